"""``comrope bench``: it gates, it takes turns, it keeps what is finished."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.benches import CPU, TINY, command, fake, fake_part

from comrope.experiments.bench import rivals, rotations, runner, suites
from comrope.experiments.bench.language import llama_block
from comrope.experiments.bench.rivals import PLAIN, RIVALS, PlainRoPE, Shape
from comrope.experiments.bench.rotations import COPY, HUGGING_FACE, llama_rotation
from comrope.experiments.bench.runner import (
    FAILURES,
    Benchmark,
    Candidate,
    run_part,
)
from comrope.experiments.common import timing
from comrope.experiments.common.timing import Times

GRID_SHAPE = Shape(5, 2, 16, (2, 2), CPU, torch.float32)
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


def by_name(rows: list[dict]) -> dict[str, dict]:
    return {row["name"]: row for row in rows}


def broken() -> Benchmark:
    raise RuntimeError("no such luck\nand more")


# What it writes


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    return out, suites.bench(["liere", "rotation"], TINY, out, preset="tiny", progress=False)


def test_json_and_figure_are_written(measured):
    out, results = measured
    assert json.loads((out / "results.json").read_text()) == results
    assert results["suites"] == list(results["finished"]) == ["rotation", "liere"]
    assert results["setting"]["grid"] == [2, 2]
    about = results["machine"]
    for key in ("device", "torch", "triton", "timm", "transformers", "date", "commit", "dirty"):
        assert key in about
    timed = [row["measures"] for row in results["rows"] if row["status"] == "timed"]
    assert {name for measures in timed for name in measures} >= {"forward", "step"}
    assert all(found["ms"] > 0 for measures in timed for found in measures.values())
    assert (out / "figure.png").stat().st_size > 20_000


def test_every_rotation_is_checked_before_it_is_timed(measured):
    _, results = measured
    assert results["failures"] == 0
    rows = by_name(row for row in results["rows"] if row["suite"] == "rotation")
    for name in (*RIVALS, "comrope-ld, spectral", "comrope-ld, Algorithm 1, per sample"):
        row = rows[name]
        if row["status"] == "not installed":
            assert name.startswith("rotary-embedding-torch")
            continue
        assert 0 < row["error"] <= row["limit"] < 1e-4
        assert row["measures"]["step"]["ms"] > 0
        assert row["measures"]["step"]["fraction_of_copy_bandwidth"] > 0
    assert rows[PLAIN]["measures"]["step"]["of"] == {"vanilla": 1.0}
    per_sample = rows["comrope-ld, spectral, per sample"]["measures"]["forward"]["of"]
    assert set(per_sample) == {"vanilla", "shared"}
    assert rows[COPY]["measures"]["forward"]["fraction_of_copy_bandwidth"] == pytest.approx(1)
    precomputed = rows["comrope-ld, precomputed angles"]["measures"]
    assert precomputed["step"]["ms"] < rows["comrope-ld, spectral"]["measures"]["step"]["ms"]


def test_a_backend_that_cannot_run_is_a_row_with_the_reason(measured):
    _, results = measured
    row = by_name(results["rows"])["liere, spectral"]
    assert row["status"] == "cannot run here"
    assert "commute" in row["reason"]
    assert not row["measures"]


@pytest.mark.parametrize("suite", ["attention", "vit", "llama", "language"])
def test_networks_are_checked_and_set_against_none(suite, tmp_path, capfd):
    results = suites.bench([suite], replace(TINY, rounds=1), tmp_path, progress=False)
    assert results["failures"] == 0
    rows = [row for row in results["rows"] if row["part"].startswith(("One", "ViT", "A Llama"))]
    named = by_name(rows)
    base, label = ("as Hugging Face has it", "stock") if suite == "language" else ("none", "none")
    assert named[base]["measures"]["step"]["of"][label] == 1
    for row in rows:
        if row["status"] != "not installed":
            assert row["error"] <= row["limit"]
            assert row["measures"]["forward"]["of"][label] > 0
    assert named["comrope-ld"]["ran"] == "spectral"
    if suite == "vit":
        of = named["timm RoPE-Mixed, whole model"]["measures"]["step"]["of"]
        assert set(of) == {"none", "vanilla", "timm APE"}
    assert "comrope-ld (spectral)" in capfd.readouterr().out


# The gate


def test_a_wrong_candidate_is_not_timed_and_the_exit_code_says_so(monkeypatch, tmp_path, capfd):
    sizes = {name: getattr(TINY, name) for name in suites.PRESETS["small"].sizes}
    tiny = replace(suites.PRESETS["small"], sizes=sizes)
    monkeypatch.setitem(suites.PRESETS, "small", tiny)
    monkeypatch.setattr(rotations, "RIVALS", {PLAIN: PlainRoPE.of})
    monkeypatch.setattr(rivals, "_rotate_half", lambda x: 1.001 * x)
    assert command(monkeypatch, "rotation", "--rounds", 1, "--out", tmp_path) == 1
    said = capfd.readouterr()
    assert "parity failed (" in said.out
    assert "1 checks failed" in said.err
    rows = by_name(json.loads((tmp_path / "results.json").read_text())["rows"])
    assert rows[PLAIN]["status"] == "parity failed"
    assert rows[PLAIN]["measures"] == {}
    assert rows["comrope-ld, spectral"]["status"] == "timed"


def test_a_missing_library_and_a_crash_are_told_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "rotary_embedding_torch", None)
    missing = Candidate("theirs", lambda: rivals.RotaryEmbeddingTorch(GRID_SHAPE), "rope")
    part = fake_part(fake("none"), missing, Candidate("ours", broken, "rope", "auto"))
    rows = by_name(run_part(part, TINY))
    assert rows["theirs"]["status"] == "not installed"
    assert rows["theirs"]["reason"] == "rotary_embedding_torch"
    assert rows["ours"]["status"] == "failed"
    assert rows["ours"]["reason"] == "RuntimeError: no such luck"
    assert rows["none"]["status"] == "timed"


# The clock


def test_candidates_take_turns():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    work = {name: timing.make_ready(call, CPU, rounds=3) for name, call in calls.items()}
    order.clear()
    found = timing.time_in_turns(work, CPU)
    assert "".join(order) == "".join(work[name].repeats * name for name in "abc") * 3
    assert all(times.rounds == 3 for times in found.values())


def test_slow_calls_have_fewer_rounds(monkeypatch):
    monkeypatch.setattr(timing, "LONGEST", 0.05)
    calls = {"slow": lambda: time.sleep(0.02), "quick": lambda: None}
    work = {name: timing.make_ready(call, CPU, rounds=9) for name, call in calls.items()}
    found = timing.time_in_turns(work, CPU)
    assert (found["slow"].rounds, found["quick"].rounds) == (timing.FEWEST, 9)


def test_a_gpu_has_a_number(monkeypatch):
    """What torch.cuda.set_device asks for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name in ("auto", "cuda"):
        assert suites.setting_of(device=name).device == torch.device("cuda:1")
    assert suites.setting_of(device="cuda:0").device == torch.device("cuda:0")


def test_the_median_and_the_quartiles():
    times = Times.of([(took, took) for took in (0.001, 0.002, 0.003, 0.004, 0.1)])
    assert (times.ms, times.low, times.high) == pytest.approx((3, 2, 4))
    assert Times.of([(0.001, 0.002)]) == pytest.approx((1, 1, 1, 2, 1, 0))


def test_compiled_candidates_are_set_against_the_yardstick_beside_them(monkeypatch):
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


def test_compiled_rows_stand_beside_eager_ones(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    setting = replace(TINY, compile=True, rounds=1)
    for make in (llama_rotation, llama_block):
        rows = [row for row in run_part(make(setting), setting) if row["method"]]
        timed = [row for row in rows if row["compiled"] and row["status"] == "timed"]
        assert {"comrope-ld", "rope-mixed", HUGGING_FACE} <= {row["name"] for row in timed}
        assert all(row["measures"]["step"]["of"]["Hugging Face"] > 0 for row in timed)
        assert not any(row["status"] in FAILURES for row in rows)
