"""Attention in windows, and the feature pyramid."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for
from torch import nn

from comrope.models.detection.pyramid import SimplePyramid, windowed_attention


@pytest.mark.parametrize("grid", [(8, 12), (5, 7), (3, 9), (2, 3)])
def test_windowed_attention_is_attention_with_a_mask_over_the_map(grid):
    """The reference: attention over the whole map, masked to the window of each token."""
    tokens = grid[0] * grid[1]
    inputs = [torch.randn(2, 3, tokens, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    row, column = torch.meshgrid(*(torch.arange(size) // 4 for size in grid), indexing="ij")
    window = (row * 100 + column).flatten()
    same = window[:, None] == window
    outcomes = []
    for got in (
        windowed_attention(*inputs, grid, 4),
        nn.functional.scaled_dot_product_attention(*inputs, attn_mask=same),
    ):
        outcomes.append([got, *torch.autograd.grad(got.tanh().square().sum(), inputs)])
    for got, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_pyramid_has_five_strides():
    pyramid = SimplePyramid(48, 32)
    maps = pyramid(torch.randn(2, 48, 8, 12))
    assert {name: tuple(x.shape) for name, x in maps.items()} == {
        "0": (2, 32, 32, 48),
        "1": (2, 32, 16, 24),
        "2": (2, 32, 8, 12),
        "3": (2, 32, 4, 6),
        "pool": (2, 32, 2, 3),
    }
    assert list(maps) == ["0", "1", "2", "3", "pool"]
    assert pyramid.out_channels == 32
    assert SimplePyramid(48).out_channels == 256


@pytest.mark.parametrize("finest", [4, 2, 1])
def test_a_pyramid_may_begin_at_a_coarser_stride(finest):
    x = torch.randn(1, 48, 16, 32)
    sizes = [tuple(level.shape[2:]) for level in SimplePyramid(48, 8, finest=finest)(x).values()]
    assert sizes == [(16 * finest // 2**level, 32 * finest // 2**level) for level in range(5)]
    least = 8 // finest
    with pytest.raises(ValueError, match=f"x: expected a map of at least {least} x {least}"):
        SimplePyramid(48, 8, finest=finest)(x[..., : least - 1])


def test_errors_of_the_pyramid_name_the_argument():
    with raises_for("x"):
        SimplePyramid(48)(torch.randn(1, 48, 1, 4))
    with raises_for("finest"):
        SimplePyramid(48, finest=3)
