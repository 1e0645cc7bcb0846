from __future__ import annotations

import pytest
import torch
from helpers import raises_for

import comrope


def test_patch_centres_with_the_last_axis_fastest():
    expected = [
        [0.25, 1 / 6],
        [0.25, 0.5],
        [0.25, 5 / 6],
        [0.75, 1 / 6],
        [0.75, 0.5],
        [0.75, 5 / 6],
    ]
    torch.testing.assert_close(comrope.grid((2, 3)), torch.tensor(expected))


@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 1, 4), (2, 2, 2, 2), (0,), (4, 0)])
def test_grids_of_any_rank_and_shape(shape):
    positions = comrope.grid(shape)
    assert positions.shape == (torch.Size(shape).numel(), len(shape))
    assert ((positions > 0) & (positions < 1)).all()


def test_the_same_place_has_the_same_coordinate_at_any_resolution():
    fine = comrope.grid((4, 4)).view(4, 4, 2)
    pooled = torch.nn.functional.avg_pool2d(fine.permute(2, 0, 1), 2).permute(1, 2, 0)
    torch.testing.assert_close(pooled.reshape(-1, 2), comrope.grid((2, 2)))


def test_scale_counts_in_patches():
    torch.testing.assert_close(comrope.grid((3,), scale=3)[:, 0], torch.tensor([0.5, 1.5, 2.5]))
    steps = comrope.grid((2, 5), scale=(2, 5)).view(2, 5, 2)
    torch.testing.assert_close(steps[:, 1:, 1] - steps[:, :-1, 1], torch.ones(2, 4))


def test_relative_scaling():
    pixels = torch.tensor([[112.0, 56.0], [0.0, 224.0]])
    expected = torch.tensor([[0.5, 0.5], [0.0, 2.0]])
    torch.testing.assert_close(comrope.normalize(pixels, (224, 112)), expected)


def test_class_token_at_the_centre():
    positions = comrope.with_class_token(comrope.grid((2, 2)), count=2)
    assert positions.shape == (6, 2)
    assert (positions[:2] == 0.5).all()
    batch = comrope.with_class_token(torch.rand(3, 4, 2), center=(1.0, 2.0))
    assert batch.shape == (3, 5, 2)
    assert (batch[:, 0] == torch.tensor([1.0, 2.0])).all()


def test_noise_has_the_papers_spread_and_stays_in_the_patch():
    positions = comrope.grid((20, 10))
    patch = (1 / 20, 1 / 10)
    noise = comrope.perturb(positions, patch, 0.1, batch_size=200) - positions
    spread = noise.std(dim=(0, 1)) / torch.tensor(patch)
    torch.testing.assert_close(spread, torch.full((2,), 0.1), rtol=0.02, atol=0)
    wild = comrope.perturb(positions, patch, 5.0, batch_size=50) - positions
    assert (wild.abs() <= torch.tensor(patch) / 2 + 1e-6).all()
    assert (wild.abs() >= torch.tensor(patch) / 2 - 1e-6).float().mean() > 0.9  # clamped there


def test_noise_is_drawn_per_sample_or_for_all():
    positions = comrope.grid((4, 4))
    per_sample = comrope.perturb(positions, 0.25, 1.0, batch_size=3)
    assert per_sample.shape == (3, 16, 2)
    assert not torch.equal(per_sample[0], per_sample[1])
    assert comrope.perturb(positions, 0.25, 1.0).shape == (16, 2)
    batch = positions.expand(3, -1, -1)
    again = comrope.perturb(batch, 0.25, 1.0)
    assert not torch.equal(again[0], again[1])
    assert torch.equal(comrope.perturb(positions, 0.25, 0.0), positions)


def test_integer_coordinates_become_floating():
    tokens = torch.arange(8).view(4, 2)
    assert (comrope.with_class_token(tokens)[0] == 0.5).all()
    torch.testing.assert_close(comrope.normalize(tokens, (2.5, 4.0))[3], torch.tensor([2.4, 1.75]))
    assert comrope.perturb(tokens, 1.0, 1.0).is_floating_point()
    assert comrope.shift(tokens, 1.0).is_floating_point()


def test_only_the_named_axes_are_perturbed():
    positions = comrope.grid((3, 4, 4))
    noise = comrope.perturb(positions, 0.25, 1.0, axes=(1, 2)) - positions
    assert (noise[:, 0] == 0).all()
    assert (noise[:, 1:] != 0).all()


def test_shift_moves_all_tokens_of_a_sample_together():
    positions = comrope.grid((4, 4), dtype=torch.float64)
    moved = comrope.shift(positions, 2.0, batch_size=500) - positions
    torch.testing.assert_close(moved, moved[:, :1].expand_as(moved))
    spread = moved[:, 0].std(dim=0)  # over samples, for each axis
    torch.testing.assert_close(spread, torch.full((2,), 2.0).double(), rtol=0.1, atol=0)
    assert (moved[:, 0, 0] - moved[:, 0, 1]).abs().min() > 0  # the axes move apart
    assert comrope.shift(positions, 2.0).shape == (16, 2)


@pytest.mark.parametrize("noise", [lambda p, g: comrope.perturb(p, 0.1, 1.0, generator=g),
                                   lambda p, g: comrope.shift(p, 1.0, generator=g)])  # fmt: skip
def test_generators_make_noise_repeatable_and_leave_the_global_one_alone(noise):
    positions = comrope.grid((4, 4))
    state = torch.get_rng_state()
    first = noise(positions, torch.Generator().manual_seed(3))
    assert torch.equal(first, noise(positions, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, noise(positions, torch.Generator().manual_seed(4)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("shape", lambda p: comrope.grid(())),
        ("shape", lambda p: comrope.grid(7)),
        ("shape", lambda p: comrope.grid((2, -1))),
        ("shape", lambda p: comrope.grid((2.0, 2))),
        ("scale", lambda p: comrope.grid((2, 2), scale=(1, 2, 3))),
        ("scale", lambda p: comrope.grid((2, 2), scale=float("nan"))),
        ("canvas", lambda p: comrope.normalize(p, (4, 0))),
        ("canvas", lambda p: comrope.normalize(p, None)),
        ("count", lambda p: comrope.with_class_token(p, count=-1)),
        ("intensity", lambda p: comrope.perturb(p, 0.1, "1")),
        ("patch_size", lambda p: comrope.perturb(p, -0.1, 1)),
        ("patch_size", lambda p: comrope.perturb(p, (0.1,) * 3, 1)),
        ("axes", lambda p: comrope.perturb(p, 0.1, 1, axes=(2,))),
        ("batch_size", lambda p: comrope.perturb(p, 0.1, 1, batch_size=-1)),
        ("batch_size", lambda p: comrope.perturb(p[None], 0.1, 1, batch_size=2)),
        ("std", lambda p: comrope.shift(p, float("inf"))),
        ("positions", lambda p: comrope.shift(p[0], 1.0)),
        ("positions", lambda p: comrope.shift(p * float("nan"), 1.0)),
    ],
)
def test_bad_input_is_named(argument, call):
    with raises_for(argument):
        call(torch.rand(3, 2))
