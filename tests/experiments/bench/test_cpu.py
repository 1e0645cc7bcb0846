"""Comparisons for a CPU: every row is checked, and ratios are to the rows of the same rounds."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import pytest
import torch
from support.benches import TINY

from comrope.experiments.bench import cpu, rivals
from comrope.experiments.bench.cpu import COPY_QK, FOLDED, decode, layer, layer_bfloat16, step
from comrope.experiments.bench.rivals import TIMM_AXIAL, TIMM_MIXED
from comrope.experiments.bench.runner import FAILURES, run_part

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]
TWICE = replace(TINY, runs=2, rounds=1)


@pytest.fixture(autouse=True)
def two_methods(monkeypatch):
    monkeypatch.setattr(cpu, "COMMUTING", ("rope-mixed", "comrope-ld"))


def by_name(rows):
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("make", [layer, layer_bfloat16])
def test_a_layer_is_compared_with_timms_rotations_in_every_repetition(make):
    rows = by_name(run_part(make(TWICE), TWICE))
    assert not any(row["status"] in FAILURES for row in rows.values())
    ours, base = (rows[name]["measures"]["step"] for name in ("comrope-ld", TIMM_MIXED))
    ratios = [mine / theirs for mine, theirs in zip(ours["runs"], base["runs"], strict=True)]
    assert ours["of_runs"]["timm RoPE-Mixed"] == pytest.approx(ratios)
    assert ours["of"]["timm RoPE-Mixed"] == pytest.approx(statistics.median(ratios))
    assert rows[TIMM_AXIAL]["measures"]["step"]["of"]["timm axial"] == 1
    assert rows[COPY_QK]["peak_mib"] > 0
    assert rows[COPY_QK]["error"] <= rows[COPY_QK]["limit"]


def test_bfloat16_is_not_measured_twice():
    assert not layer_bfloat16(replace(TINY, dtype=torch.bfloat16)).candidates


def test_a_wrong_library_has_no_speed(monkeypatch):
    class Wrong(rivals.TimmAxial):
        def rotate(self, q, k):
            q, k = super().rotate(q, k)
            return q, 1.001 * k

    monkeypatch.setitem(rivals.RIVALS, TIMM_AXIAL, Wrong)
    rows = by_name(run_part(layer(TWICE), TWICE))
    assert rows[TIMM_AXIAL]["status"] == "parity failed"
    assert rows[TIMM_AXIAL]["measures"] == {}
    assert rows["comrope-ld"]["measures"]["step"]["of"].keys() == {"timm RoPE-Mixed"}


@pytest.mark.parametrize("package", ["timm.layers", "x_transformers.x_transformers"])
def test_a_missing_library_is_a_row_with_the_reason(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    rows = by_name(run_part(layer(TINY), replace(TINY, rounds=1)))
    missing = TIMM_MIXED if "timm" in package else "x-transformers (1-D)"
    assert rows[missing]["status"] == "not installed"
    assert rows["comrope-ld"]["status"] == "timed"


def test_a_decoded_token_is_that_of_all_tokens_at_once(monkeypatch):
    rows = by_name(run_part(decode(TWICE), TWICE))
    assert [row["status"] for row in rows.values()] == ["timed"] * 3
    assert len(rows["comrope-ld"]["measures"]["forward"]["of_runs"]["none"]) == 2
    shifted = cpu.Decoder.forward

    def forward(self, token):
        self.before -= 1  # a position before the right one
        return shifted(self, token)

    monkeypatch.setattr(cpu.Decoder, "forward", forward)
    rows = by_name(run_part(decode(TINY), TINY))
    assert rows["comrope-ld"]["status"] == "parity failed"


def test_a_step_is_compared_with_the_network_without_positions(monkeypatch):
    monkeypatch.setattr(cpu, "VITS", ("none", "comrope-ld"))
    part = step(replace(TINY, runs=2))
    assert "batch 1," in part.title
    rows = by_name(run_part(part, replace(TINY, runs=2)))
    assert list(rows) == ["none", "comrope-ld", FOLDED]
    assert not any(row["status"] in FAILURES for row in rows.values())
    assert rows[FOLDED]["measures"].keys() == {"forward"}
    assert rows["comrope-ld"]["measures"]["step"]["of"]["none"] > 0
    assert rows["comrope-ld"]["peak_of"]["none"] >= 1
