"""A GPT with every rotation is checked, with several samples, and compared with vanilla RoPE."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.benches import TINY
from torch import nn

from comrope.experiments.bench.gpt import VALUES, gpt
from comrope.experiments.bench.runner import FAILURES, run_part
from comrope.methods import METHODS

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]
SETTING = replace(TINY, rounds=1)


def test_every_rotation_is_checked_and_compared_with_vanilla_rope():
    named = {row["name"]: row for row in run_part(gpt(SETTING), SETTING)}
    assert not any(row["status"] in FAILURES for row in named.values())
    assert {*METHODS, "none", "comrope-ld" + VALUES} <= {*named}
    assert named["rope"]["measures"]["step"]["of"]["rope"] == 1
    for row in named.values():
        assert row["error"] <= row["limit"]
        assert row["measures"]["step"]["of"]["rope"] > 0


class Drop(nn.Module):
    """A GPT whose last sample is wrong."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens):
        factors = torch.ones(len(tokens), 1, 1)
        factors[-1] = 1.5 if tokens.shape[0] == SETTING.gpt["batch"] else 1.0
        return factors * self.model(tokens)


def test_the_check_fails_if_one_sample_of_the_batch_is_wrong(monkeypatch):
    part = gpt(SETTING)
    rope = next(candidate for candidate in part.candidates if candidate.name == "rope")
    make = rope.build.args[1]
    build = type(rope.build)(
        rope.build.func,
        rope.build.args[0],
        lambda: Drop(make()),
        *rope.build.args[2:],
        **rope.build.keywords,
    )
    (row,) = run_part(replace(part, candidates=[replace(rope, build=build)]), SETTING)
    assert row["status"] == "parity failed"
