"""Blocks and models of language are checked and compared with what Hugging Face has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.benches import TINY

from comrope.experiments.bench.language import llama_block, llama_model
from comrope.experiments.bench.rotations import HUGGING_FACE
from comrope.experiments.bench.runner import FAILURES, run_part

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


@pytest.mark.parametrize(
    ("make", "base", "label"),
    [
        (llama_block, "none", "none"),
        pytest.param(llama_model, "as Hugging Face has it", "stock", marks=pytest.mark.slow),
    ],
)
def test_language_is_checked_and_compared(make, base, label):
    setting = replace(TINY, rounds=1)
    named = {row["name"]: row for row in run_part(make(setting), setting)}
    assert not any(row["status"] in FAILURES for row in named.values())
    assert named[base]["measures"]["step"]["of"][label] == 1
    for row in named.values():
        assert row["error"] <= row["limit"]
        assert row["measures"]["forward"]["of"][label] > 0
    assert named["comrope-ld"]["ran"] == "spectral"


@pytest.mark.slow
def test_compiled_blocks_stand_beside_eager_ones(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    setting = replace(TINY, compile=True, rounds=1)
    rows = [row for row in run_part(llama_block(setting), setting) if row["method"]]
    timed = [row for row in rows if row["compiled"] and row["status"] == "timed"]
    assert {"comrope-ld", "rope-mixed", HUGGING_FACE} <= {row["name"] for row in timed}
    assert not any(row["status"] in FAILURES for row in rows)
