"""The spectral rotation against the paper's Algorithm 1, in values and in all gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_parity, fits, make, queries_and_keys, relative_error

from comrope.analysis import scores

INITS = ("normal", "zeros", "rope")
SIZES = [(b, n) for b in (2, 3, 4, 8, 16) for n in (1, 2, 3, 4)]
# Every block size with every initialization, every number of axes with every initialization.
COVERING = [
    (b, (i + j) % 4 + 1, init) for i, b in enumerate((2, 3, 4, 8)) for j, init in enumerate(INITS)
]


@pytest.mark.parametrize(("block_size", "num_axes"), SIZES)
def test_every_size(block_size, num_axes):
    init = INITS[(block_size + num_axes) % 3]
    assert_parity(make("comrope-ld", block_size=block_size, num_axes=num_axes, init=init))


def test_every_pair_of_size_and_initialization(commuting):
    for block_size, num_axes, init in COVERING:
        if not fits(commuting, num_axes=num_axes, init=init):
            continue
        assert_parity(make(commuting, block_size=block_size, num_axes=num_axes, init=init))


@pytest.mark.slow
@pytest.mark.parametrize("init", INITS)
def test_every_size_and_initialization(commuting, init):
    for block_size, num_axes in SIZES:
        if not fits(commuting, num_axes=num_axes, init=init):
            continue
        assert_parity(make(commuting, block_size=block_size, num_axes=num_axes, init=init))


def test_positions_per_sample(commuting):
    for axes in [axes for axes in (2, 3) if fits(commuting, num_axes=axes)]:
        positions = torch.randn(2, 6, axes, dtype=torch.float64)
        assert_parity(make(commuting, num_axes=axes), positions)


def test_positions_of_any_scale(commuting):
    """Angles of a thousand turns lose digits in both backends alike."""
    for spread in (1e-6, 1e-3, 1e3):
        positions = spread * torch.randn(6, 2, dtype=torch.float64)
        assert_parity(make(commuting, block_size=8), positions, scores_within=1e-10)


def test_liere_on_one_axis_has_a_spectrum():
    assert_parity(make("liere", num_axes=1, block_size=8))


def test_scores_do_not_depend_on_the_backend_in_float32(commuting):
    rope = make(commuting, block_size=8, dtype=torch.float32)
    q, k = (x.detach().float() for x in queries_and_keys(rope))
    positions = torch.rand(6, 2)
    rope.backend = "reference"
    expected = scores(rope, q, k, positions)
    rope.backend = "spectral"
    assert relative_error(scores(rope, q, k, positions), expected) <= 1e-5
