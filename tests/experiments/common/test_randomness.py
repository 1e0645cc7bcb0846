"""Draws are a function of what they are for, and leave the generators of others alone."""

from __future__ import annotations

import random

import numpy as np
import torch

from comrope.experiments.common.randomness import derive, generator, seed_everything, seeded


def draws() -> tuple:
    return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert derive(0, "order", 3) == 8244215730568551301  # on every machine: runs depend on it
    parts = [(0, "order", 3), (0, "order", 4), (0, "image", 3), (1, "order", 3), (0, "order3")]
    assert len({derive(*some) for some in parts}) == len(parts)
    assert all(0 <= derive(n) < 2**63 for n in range(50))


def test_generators_of_the_same_purpose_draw_the_same():
    one, again, other = (torch.rand(4, generator=generator(0, n)) for n in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_all_global_generators_are_seeded():
    seed_everything(0, "step", 1)
    first = draws()
    seed_everything(0, "step", 2)
    second = draws()
    seed_everything(0, "step", 1)
    assert draws() == first
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_inside_a_block_only():
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with seeded("image", 7):
        inside = draws()
    assert draws() == expected
    with seeded("image", 7):
        assert draws() == inside
    seed_everything(1)
    with seeded("image", 7, numpy=False):
        assert (random.random(), float(torch.rand(()))) == (inside[0], inside[2])
    assert draws() == expected
