"""Candidates are checked, timed in turns, and compared with the reference rows beside them."""

from __future__ import annotations

import sys

import pytest
import torch
from support.benches import CPU, TINY, fake, fake_part

from comrope.experiments.bench import rivals, runner
from comrope.experiments.bench.cases import Shape
from comrope.experiments.bench.runner import Benchmark, Candidate, run_part
from comrope.experiments.common.timing import Times

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]
SHAPE = Shape(5, 2, 16, (2, 2), CPU, torch.float32)


def by_name(rows: list[dict]) -> dict[str, dict]:
    return {row["name"]: row for row in rows}


def broken() -> Benchmark:
    raise RuntimeError("no such luck\nand more")


def test_rows_have_times_and_ratios():
    calls = []
    part = fake_part(fake("none", error=1e-7), fake("ours", call=lambda: calls.append(1)))
    rows = by_name(run_part(part, TINY))
    assert calls
    assert rows["none"]["error"] == 1e-7
    for row in rows.values():
        assert row["status"] == "timed"
        for measure in row["measures"].values():
            assert 0 < measure["low"] <= measure["ms"] <= measure["high"]
            assert measure["of"]["none"] > 0
    assert rows["none"]["measures"]["step"]["of"] == {"none": 1}


@pytest.mark.parametrize("error", [1e-5, float("nan")])
def test_a_wrong_candidate_is_not_timed(error):
    called = []
    wrong = fake("wrong", call=lambda: called.append(1), error=error)
    rows = by_name(run_part(fake_part(fake("none"), wrong), TINY))
    assert rows["wrong"]["status"] == "parity failed"
    assert rows["wrong"]["measures"] == {}
    assert rows["none"]["status"] == "timed"
    assert not called


def test_a_missing_library_and_a_crash_are_distinguished(monkeypatch):
    monkeypatch.setitem(sys.modules, "rotary_embedding_torch", None)
    missing = Candidate("theirs", lambda: rivals.RotaryEmbeddingTorch(SHAPE), "rope")
    part = fake_part(fake("none"), missing, Candidate("ours", broken, "rope", "auto"))
    rows = by_name(run_part(part, TINY))
    assert rows["theirs"]["status"] == "not installed"
    assert rows["theirs"]["reason"] == "rotary_embedding_torch"
    assert rows["ours"]["status"] == "failed"
    assert rows["ours"]["reason"] == "RuntimeError: no such luck"
    assert rows["none"]["status"] == "timed"


def test_compiled_candidates_are_compared_with_the_reference_row_beside_them(monkeypatch):
    """The machine slows down by half; ratios to the reference_row do not notice."""
    pace = [1.0]
    units = {"none": 10.0, "slow": 20.0, "fast": 11.0}
    called: list[str] = []
    turns: list[str] = []

    def in_turns(work, device, **_):
        found = {}
        for key, ready in work.items():
            ready.run()
            turns.append(called[-1])
            ms = units[called[-1]] * pace[0]
            found[key] = Times(ms, ms, ms, ms, 1)
        pace[0] *= 1.5
        return found

    monkeypatch.setattr(runner, "time_in_turns", in_turns)
    part = fake_part(
        *(fake(n, call=lambda n=n: called.append(n), compiled=True) for n in ("slow", "none")),
        *(fake("fast", call=lambda: called.append("fast"), compiled=c) for c in (True, False)),
    )
    rows = run_part(part, TINY)
    found = {(row["name"], row["compiled"]): row["measures"]["step"]["of"] for row in rows}
    every_call_twice = ["fast", "slow", "none", "fast", "none"]  # forward and step
    assert turns == [name for name in every_call_twice for _ in range(2)]
    assert found["none", True] == {"none": 1}
    assert found["slow", True]["none"] == pytest.approx(2, rel=1e-3)
    assert found["fast", True]["none"] == pytest.approx(1.1, rel=1e-3)
    assert found["fast", False] == {}  # there is no eager reference_row here
