"""The correctness check of benchmarks: small faults fail, the rounding of a dtype passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from comrope.experiments.bench.cases import Shape
from comrope.experiments.bench.parity import network_parity, rotation_parity, watched_samples
from comrope.experiments.bench.rivals import PlainRoPE, RivalAttention
from comrope.models.attention import Attention

CPU = torch.device("cpu")
GRID_SHAPE = Shape(5, 2, 16, (2, 2), CPU, torch.float32)


def queries(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = torch.randn(2, 4, 2, 5, 16).to(dtype).unbind(0)
    return q, k


class OffBy(PlainRoPE):
    """Vanilla RoPE with a fault."""

    def __init__(self, fault: str, shape: Shape) -> None:
        super().__init__(PlainRoPE.of(shape).exact_phases, shape.dtype)
        self.fault = fault

    def rotate(self, q, k):
        if self.fault == "gradient":  # right values, and half of q's gradient
            q = 0.5 * q + 0.5 * q.detach()
        turned_q, turned_k = super().rotate(q, k)
        if self.fault == "values":
            return turned_q * 1.0001, turned_k
        if self.fault == "last sample":
            return turned_q, torch.cat((turned_k[:-1], k[-1:]))
        if self.fault == "NaN":
            return turned_q, turned_k * torch.nan
        if self.fault == "one token":
            return torch.cat((turned_q[:, :, :-1], q[:, :, -1:]), dim=2), turned_k
        return turned_q, turned_k


@pytest.mark.parametrize("fault", ["values", "gradient", "last sample", "one token", "NaN"])
def test_small_faults_fail(fault):
    sound, faulty = OffBy("none", GRID_SHAPE), OffBy(fault, GRID_SHAPE)
    q, k = queries()
    assert rotation_parity(sound.rotate, sound.define, q, k).passed
    assert not rotation_parity(faulty.rotate, faulty.define, q, k).passed


def test_the_rounding_of_a_dtype_passes_and_no_more():
    q, k = queries(torch.bfloat16)
    rope = PlainRoPE.of(GRID_SHAPE._replace(dtype=torch.bfloat16))
    verdict = rotation_parity(rope.rotate, rope.define, q, k)
    assert 1e-3 < verdict.error <= verdict.limit < 1e-2

    def wrong(q, k):
        return 1.01 * rope.rotate(q, k)[0], k

    assert not rotation_parity(wrong, rope.define, q, k).passed


def test_a_network_with_a_wrong_rotation_does_not_pass():
    def state(module: nn.Module) -> None:
        module.rival.use_definition = True

    def cast() -> torch.autocast:
        return torch.autocast("cpu", enabled=False)

    for fault, passes in (("none", True), ("gradient", False), ("last sample", False)):
        layer = RivalAttention(Attention(32, 2), OffBy(fault, GRID_SHAPE))
        inputs = (torch.randn(4, 5, 32), torch.rand(5, 2))
        assert network_parity(layer, inputs, cast, state, compiled=False).passed == passes, fault


def test_first_middle_and_last_sample_are_compared():
    assert watched_samples(128) == [0, 64, 127]
    assert watched_samples(1) == [0]
    assert watched_samples(4, 2**23) == [3]
