"""Readers of files, fuzzed: kept inputs that once failed, and a few random ones (tools/fuzz)."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from fuzz import judge, targets
from fuzz.judge import Finding
from fuzz.kept import CORPUS, kept_inputs, read_input

from comrope._checks import one_line

MOST_BYTES = 200_000  # of the corpus
RANDOM = 150  # inputs of each target
NEEDS = {"coco": "pycocotools", "images": "timm", "tars": "timm"}
KEPT = [(name, file) for name in targets.NAMES for file in kept_inputs(name)]


@pytest.fixture(scope="module")
def created(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """The targets by name, each created once."""
    folder = tmp_path_factory.mktemp("fuzz")

    class Created(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            pytest.importorskip(NEEDS.get(name, "comrope"))
            self[name] = targets.create(name, folder / name)
            return self[name]

    return Created()


@pytest.mark.parametrize("name", targets.NAMES)
def test_valid_inputs_are_accepted(name, created):
    for data in created[name].seeds():
        assert created[name].run(data), data[:200]


@pytest.mark.parametrize(("name", "file"), KEPT, ids=[f"{n}-{f.name}" for n, f in KEPT])
def test_inputs_that_once_failed(name, file, created):
    created[name].run(read_input(file))


@pytest.mark.slow
@pytest.mark.parametrize("name", targets.NAMES)
def test_random_inputs(name, created):
    target, rng = created[name], random.Random(0)
    inputs = target.seeds()
    for _ in range(RANDOM):
        data = target.mutate(rng.choice(inputs), rng)
        try:
            if target.run(data):
                inputs.append(data)
        except Finding as found:
            pytest.fail(f"{found}\n{data!r}"[:5000])


def test_the_corpus_is_small_and_has_known_targets():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert {path.parent.name for path in files} <= set(targets.NAMES)


# Broken readers are found: without this, no other test of this file could fail.


def refuse(message: str, kind: type[Exception] = ValueError):
    def read() -> None:
        raise kind(message)

    return read


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (refuse("a.json: no", KeyError), "KeyError"),
        (refuse("a.json: no", RecursionError), "RecursionError"),
        (refuse("a.json: one\ntwo"), "several lines"),
        (refuse("a.json: \x1b[31m"), "control characters"),
        (refuse("a.json: " + "x" * 5000), "a long message"),
        (refuse("b.json: no"), "names no file"),
        (refuse(""), "empty"),
    ],
)
def test_bad_errors_are_found(read, kind):
    with pytest.raises(Finding, match=kind):
        judge.ask(read, names=["a.json"], errors=(ValueError,))
    assert judge.ask(refuse("a.json: no"), names=["a.json"], errors=(ValueError,)).message


class Trap:
    def __reduce__(self) -> Any:
        return one_line, ("opened",)


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda folder: subprocess.run(["true"], check=True), "forbidden"),
        (lambda folder: os.system("true"), "forbidden"),
        (lambda folder: pickle.loads(pickle.dumps(Trap())), "forbidden"),
        (lambda folder: (folder.parent / "elsewhere").write_text("a"), "forbidden"),
        (lambda folder: (folder / "here").rename(folder.parent / "there"), "forbidden"),
        (lambda folder: warnings.warn("odd", stacklevel=1), "warning"),
        (lambda folder: print("\x1b[31m"), "prints control characters"),
        (lambda folder: bytearray(2**33), "memory"),
        (lambda folder: time.sleep(9), "hangs"),
    ],
)
def test_bad_acts_are_found(act, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "HANGS", 1)
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "here").write_text("a")
    with pytest.raises((Finding, MemoryError), match=f"{kind}|^$"), judge.watched(folder):
        act(folder)
    with judge.watched(folder):
        (folder / "other").write_text("a")


FLIP = b'[["flip", "model.safetensors", 300000, 6]]'
PRETRAINED, RUNS = "comrope.models.pretrained", "comrope.experiments.runs"
# Checks that a reader loses, and inputs that it then accepts.
BROKEN = [
    ("runs", f"{RUNS}.seal.changed_files", lambda *_: [], FLIP),
    ("runs", f"{RUNS}.directory.nonfinite", lambda _: [], b'[["put", "model.safetensors", 618060, '
     b'"\\u0000\\u0000\\u00c0\\u007f", 4], ["unseal"]]'),
    ("models", f"{PRETRAINED}.sha256_of", lambda _: ANY, FLIP),
    ("logs", f"{RUNS}.log._record", lambda _: None, b"{}"),
    ("checkpoints", "comrope.experiments.training.checkpoint.sha256_of", lambda _: ANY,
     b'[["flip", "step-00000010/model.safetensors", -1, 0]]'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "broken", "data"), BROKEN)
def test_readers_without_a_check_are_found(name, place, broken, data, created, monkeypatch):
    target = created[name]
    target.run(data)
    monkeypatch.setattr(place, broken)
    with pytest.raises(Finding):
        target.run(data)
