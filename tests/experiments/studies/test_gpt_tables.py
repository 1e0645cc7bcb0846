"""Tables of the benchmark of a GPT: tokens per second, and hours computed from them."""

from __future__ import annotations

import pytest
from support.studies import table_lines

from comrope.experiments.studies.bench_tables import bench_table
from comrope.experiments.studies.fair.language import STUDY
from comrope.experiments.studies.study import PRESETS

MACHINE = {"device": "GPU", "torch": "1", "triton": "3", "date": "2026-01-01"}
NAMES = ("none", "rope", "rope-mixed", "comrope-ld", "comrope-torus")


def row(name: str, compiled: bool, ms: float) -> dict:
    step = {"ms": ms, "low": ms - 0.2, "high": ms + 0.2, "of": {"none": ms / 8, "rope": ms / 10}}
    return {"suite": "gpt", "part": "a GPT", "name": name, "compiled": compiled,
            "measures": {"step": step}}  # fmt: skip


def results(ms: float = 12.5) -> dict:
    rows = [row(name, True, 10.0 if name == "rope" else ms) for name in NAMES]
    rows.append(row("comrope-ld", False, 99.0))
    gpt = {"vocab_size": 1000, "batch": 16, "context": 1024}
    command = "comrope bench gpt --preset full --out a/folder --rounds 8 --quiet"
    return {"rows": rows, "command": command, "machine": MACHINE, "setting": {"gpt": gpt}}


def test_tokens_per_second_are_compared_with_vanilla_rope():
    text = bench_table("gpt", results())
    lines = table_lines(text)
    assert ["rope", "10.00 ± 0.20", "1,638,400", "1.000", "0.800"] in lines
    assert ["comrope-ld", "12.50 ± 0.20", "1,310,720", "0.800", "0.640"] in lines
    assert "a GPT, compiled, vocabulary of 1,000" in text
    assert "`comrope bench gpt --preset full --rounds 8`" in text


def test_hours_are_tokens_over_speed_summed_over_all_runs():
    def hours(ms: float) -> dict[str, list[float]]:
        lines = table_lines(bench_table("gpt-hours", results(ms)))[2:]
        return {line[0].strip("*"): [float(x.strip("*")) for x in line[1:]] for line in lines}

    found = hours(10.0)
    tokens = 2457600 * 1024
    assert found["a run: none"][1] == pytest.approx(tokens / 1.6384e6 / 3600, rel=0.05)
    runs, total, *_ = found["the study"]
    assert runs == len(STUDY.rows(PRESETS["tiny"])) * STUDY.seeds(PRESETS["paper"])
    assert total == pytest.approx(runs * tokens / 1.6384e6 / 3600, rel=0.01)
    assert found["the study"][2] == pytest.approx(total / 8, rel=0.01)
    assert hours(20.0)["a run: none"][1] == pytest.approx(2 * found["a run: none"][1], rel=0.05)
