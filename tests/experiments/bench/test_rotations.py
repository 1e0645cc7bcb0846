"""Rotations alone: every one is checked before it is timed, and compared with vanilla RoPE."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.benches import TINY

from comrope.experiments.bench.cases import shape_of
from comrope.experiments.bench.rivals import PLAIN, RIVALS
from comrope.experiments.bench.rotations import (
    COPY,
    HUGGING_FACE,
    Layer,
    liere,
    llama_rotation,
    rotation,
)
from comrope.experiments.bench.runner import FAILURES, run_part

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


def measured(make, setting=TINY) -> dict[str, dict]:
    return {row["name"]: row for row in run_part(make(setting), setting)}


def test_every_rotation_is_checked_before_it_is_timed():
    rows = measured(rotation)
    assert not any(row["status"] in FAILURES for row in rows.values())
    for name in (*RIVALS, "comrope-ld, spectral", "comrope-ld, Algorithm 1, per sample"):
        row = rows[name]
        if row["status"] == "not installed":
            assert name.startswith(("rotary-embedding-torch", "x-transformers"))
            continue
        assert 0 < row["error"] <= row["limit"] < 1e-4
        assert row["measures"]["step"]["ms"] > 0
        assert row["measures"]["step"]["fraction_of_copy_bandwidth"] > 0
    assert rows[PLAIN]["measures"]["step"]["of"] == {"vanilla": 1.0}
    per_sample = rows["comrope-ld, spectral, per sample"]["measures"]["forward"]["of"]
    assert set(per_sample) == {"vanilla", "shared"}
    assert rows[COPY]["measures"]["forward"]["fraction_of_copy_bandwidth"] == pytest.approx(1)
    assert rows["comrope-ld, precomputed angles"]["status"] == "timed"


def test_a_backend_that_cannot_run_is_a_row_with_the_reason():
    row = measured(liere)["liere, spectral"]
    assert row["status"] == "cannot run here"
    assert "commute" in row["reason"]
    assert not row["measures"]


def test_bytes_that_must_move_are_counted():
    shape = shape_of(TINY)
    layer = Layer.random(shape, shape.heads, TINY.batch)
    size = 4 * (layer.q.numel() + layer.k.numel())
    assert layer.q.shape == (TINY.batch, shape.heads, shape.tokens, shape.head_dim)
    for angles, of_step in (((), 4), ((torch.ones(1, requires_grad=True),), 5)):
        found = layer.benchmark(lambda q, k: (q, k), angles, lambda: None).moved
        assert found == {"forward": 2 * size, "step": of_step * size}


@pytest.mark.slow
def test_compiled_rows_stand_beside_eager_ones(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    setting = replace(TINY, compile=True, rounds=1)
    rows = [row for row in run_part(llama_rotation(setting), setting) if row["method"]]
    timed = [row for row in rows if row["compiled"] and row["status"] == "timed"]
    assert {"comrope-ld", "rope-mixed", HUGGING_FACE} <= {row["name"] for row in timed}
    assert all(row["measures"]["step"]["of"]["Hugging Face"] > 0 for row in timed)
    assert not any(row["status"] in FAILURES for row in rows)
