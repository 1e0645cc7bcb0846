"""The RoPE equation: moving all positions by one offset changes no score."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import COMMUTING, fits, make

import comrope
from comrope.analysis import offset_sensitivity

OFFSETS = (0.1, 1.0, 10.0, 100.0)


def sensitivity(name: str, dtype: torch.dtype, num_axes: int, offset: float, **options) -> float:
    rope = make(name, num_axes=num_axes, dtype=dtype, block_size=8, **options)
    positions = comrope.grid((6,) * min(num_axes, 2) + (2,) * max(num_axes - 2, 0), dtype=dtype)
    return offset_sensitivity(rope, positions, offset)


@pytest.mark.parametrize("name", COMMUTING)
def test_commuting_scores_do_not_change(name):
    for num_axes, offset in itertools.product((1, 2, 3), OFFSETS):
        if not fits(name, num_axes=num_axes):
            continue
        assert sensitivity(name, torch.float32, num_axes, offset) <= 1e-3
        assert sensitivity(name, torch.float64, num_axes, offset) <= 1e-10


@pytest.mark.parametrize("num_axes", [2, 3])
def test_liere_fails_the_same_test(num_axes):
    assert sensitivity("liere", torch.float64, num_axes, 1.0) > 0.5
    assert sensitivity("liere", torch.float32, num_axes, 100.0) > 0.5


def test_liere_passes_it_on_one_axis():
    for offset in OFFSETS:
        assert sensitivity("liere", torch.float32, 1, offset) <= 1e-3
        assert sensitivity("liere", torch.float64, 1, offset) <= 1e-10


def test_an_unrotated_class_token_breaks_it_and_one_at_the_centre_does_not():
    rope = make("comrope-ld", block_size=8)
    patches = comrope.grid((4, 4), dtype=torch.float64)
    assert offset_sensitivity(rope, comrope.with_class_token(patches), 1.0) < 1e-10
    rope.num_prefix_tokens = 1
    assert offset_sensitivity(rope, comrope.with_class_token(patches), 1.0) > 0.5
