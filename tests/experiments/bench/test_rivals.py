"""Rotations of other libraries compute what their definitions say."""

from __future__ import annotations

import pytest
import torch

from comrope.experiments.bench.cases import Shape
from comrope.experiments.bench.parity import rotation_parity
from comrope.experiments.bench.rivals import PLAIN, RIVALS, HuggingFaceRoPE, PlainRoPE
from comrope.positions import grid, with_class_token
from comrope.rotary import RotaryEmbedding

CPU = torch.device("cpu")
SHAPE = Shape(7, 2, 16, (2, 3), CPU, torch.float32)  # the grid is not square


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_computes_its_definition(name):
    q, k = torch.randn(2, 3, 2, 7, 16).unbind(0)
    try:
        rival = RIVALS[name](SHAPE)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    learned = [p for p in rival.parameters() if p.requires_grad]
    verdict = rotation_parity(
        rival.rotate, rival.define, q, k, angles=learned, exact_angles=learned
    )
    assert verdict.passed, verdict
    rival.use_definition = True
    assert torch.equal(rival(q, k)[0], rival.define(q, k)[0])


def test_plain_rope_is_our_vanilla_rope():
    """Up to the order of channels: scores are the same."""
    q, k = torch.randn(2, 3, 2, 7, 16, dtype=torch.float64).unbind(0)
    rope = RotaryEmbedding("rope", num_heads=2, head_dim=16, position_scale=(2, 3), block_size=2)
    place = with_class_token(grid((2, 3), dtype=torch.float64))
    ours = rope.double()(q, k, place)
    paired = torch.arange(16).view(2, 8).mT.flatten()  # channel c goes with c + 8
    inverse = paired.argsort()
    theirs = [x[..., paired] for x in PlainRoPE.of(SHAPE).define(q[..., inverse], k[..., inverse])]
    scores = [a @ b.mT for a, b in (ours, theirs)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


def test_the_plain_tables_have_the_timed_dtype():
    rope = RIVALS[PLAIN](SHAPE._replace(dtype=torch.bfloat16))
    q, k = torch.randn(2, 3, 2, 7, 16).bfloat16().unbind(0)
    assert rope.rotate(q, k)[0].dtype == torch.bfloat16
    assert rope.rotate(q.float(), k.float())[0].dtype == torch.float32


def test_hugging_faces_sequence_has_no_grid():
    shape = Shape(9, 2, 16, (), CPU, torch.float32)
    rope = HuggingFaceRoPE(shape)
    q, k = torch.randn(2, 1, 2, 9, 16).unbind(0)
    assert shape.prefix == 0
    assert rotation_parity(rope.rotate, rope.define, q, k).passed
