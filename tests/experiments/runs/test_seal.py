"""The seal of a run has the digests of its files and of its result."""

from __future__ import annotations

import hashlib
import json

from comrope.experiments.runs.seal import changed_files, is_intact, sealed, split

RESULT = {"top1": {"12": 1 / 3, 24: 50.0}, "classes": ["ρ"], "none": None}


def test_a_result_is_intact_until_a_value_changes():
    stored = json.loads(json.dumps(sealed(RESULT, {"a": "0" * 64})))
    result, seal = split(stored)
    assert result == json.loads(json.dumps(RESULT))
    assert seal["a"] == "0" * 64
    assert is_intact(result, seal)
    assert is_intact(dict(reversed(result.items())), seal)
    assert not is_intact({**result, "none": 0}, seal)
    assert not is_intact({**result, "top1": {**result["top1"], "12": 0.3333333}}, seal)
    assert split({"top1": {}}) == ({"top1": {}}, None)


def test_files_with_another_digest_are_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    seal = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b")}
    assert changed_files(tmp_path, seal, ["a", "b"]) == []
    (tmp_path / "b").write_text("c")
    assert changed_files(tmp_path, seal, ["a", "b"]) == ["b"]
    assert changed_files(tmp_path, seal, ["a"]) == []
