"""Scalings of frequencies at evaluation: closed forms, transformers' own, and whole models."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    COMMUTING,
    assert_kernel_parity,
    assert_parity,
    fits,
    make,
    queries_and_keys,
    raises_for,
    relative_error,
)

import comrope
from comrope import inits
from comrope.analysis import rotary_modules, scores, wavelengths
from comrope.scaling import NTK, Linear, YaRN

BASE, LENGTH = 10000.0, 1024.0
SCALINGS = [Linear(4.0), NTK(4.0), YaRN(4.0, LENGTH)]
LAST = {"num_axes": 1, "block_size": 4, "head_dim": 64, "init": "rope", "base": BASE}


def frequencies(rope) -> torch.Tensor:
    """Return the frequencies of one axis, descending: (H, D // 2)."""
    return 2 * math.pi / wavelengths(rope)[0]


def closed_form(scaling) -> torch.Tensor:
    """Scale vanilla RoPE's 32 frequencies by the formulas of the papers, plane by plane."""
    found = []
    for plane in range(32):
        w, factor = BASE ** (-plane / 32), 4.0
        if isinstance(scaling, Linear):
            found.append(w / factor)
        elif isinstance(scaling, NTK):
            found.append((BASE * factor ** (64 / 62)) ** (-plane / 32))
        else:
            turns = LENGTH * w / (2 * math.pi)
            kept = min(max(math.log(turns) / math.log(32), 0), 1)
            found.append((1 - kept) * w / factor + kept * w)
    return torch.tensor(found, dtype=torch.float64)


def in_transformers(scaling) -> torch.Tensor:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=int(LENGTH)
    )
    kind, more, length = {
        Linear: ("linear", {"factor": 4.0}, None),
        NTK: ("dynamic", {"factor": 1.0}, int(4 * LENGTH)),  # the factor of this one length
        YaRN: (
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": int(LENGTH), "truncate": False},
            None,
        ),
    }[type(scaling)]
    config.rope_parameters = {"rope_type": kind, "rope_theta": BASE, **more}
    found, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    assert scaling.attention_scaling(1) == pytest.approx(factor)
    return found.double()


# The frequencies.


@torch.no_grad()
@pytest.mark.parametrize("method", [name for name in comrope.METHODS if fits(name, num_axes=1)])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_vanilla_frequencies_are_those_of_the_papers(method, scaling):
    """From one axis, every method starts with them: LieRE and matrices of ComRoPE, too."""
    rope = make(method, **LAST)
    with comrope.scaled(rope, scaling):
        found = frequencies(rope)
    expected = closed_form(scaling).expand(2, -1)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(in_transformers(scaling).expand(2, -1), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1.0, (1.0, 3.0)])
def test_ntk_on_several_axes_is_a_base_per_axis(scale):
    """Each axis is scaled as if it were alone, also in other units and by its own factor."""
    options = {"block_size": 4, "head_dim": 48, "position_scale": scale}
    rope, planes = make("rope-mixed", init="rope", base=BASE, **options), 12
    for factor in (4.0, (4.0, 2.0)):
        with comrope.scaled(rope, NTK(factor)):
            found = rope.spectrum()[1]
        for axis, s in enumerate(factor if isinstance(factor, tuple) else (factor,) * 2):
            other = make("rope", base=BASE * s ** (planes / (planes - 1)), **options)
            torch.testing.assert_close(found[axis], other.spectrum()[1][axis])


def test_ntk_of_any_frequencies():
    """The fastest plane of a head stays, the slowest is divided, zero stays, signs stay."""
    rope = make("rope-mixed", num_heads=4, num_axes=1, block_size=4, head_dim=8, init="rope")
    given = torch.tensor([[8.0, -0.5, 2.0, 0], [0, 0, 0, 0], [3, 3, -3, 3], [0, 0, 5, 0]])
    rope.method.frequencies.data.copy_(given.view(1, 4, 2, 2))
    with comrope.scaled(rope, NTK(16.0)):
        found = rope.spectrum()[1].flatten(2)[0]
    expected = [[8.0, -0.5 / 16, 0.5, 0], [0, 0, 0, 0], [3 / 16, 3 / 16, -3 / 16, 3 / 16]]
    expected = torch.tensor([*expected, [0, 0, 5 / 16, 0]]).double()
    torch.testing.assert_close(found, expected)


def test_yarn_on_several_axes_counts_turns_between_corners():
    rope = make("rope-mixed", init=inits.Isotropic(100.0), head_dim=48)
    w = rope.spectrum()[1].detach()
    for factor, lengths in ((4.0, 50.0), ((4.0, 1.0), (50.0, 20.0))):
        scaling = YaRN(factor, lengths, beta_fast=4.0, beta_slow=0.25)
        both = (torch.ones(2) * torch.tensor(each) for each in (factor, lengths))
        s, length = (each.double().view(2, 1, 1, 1) for each in both)
        turns = (w.abs() * length).sum(0) / (2 * math.pi)
        kept = ((turns / 0.25).log() / math.log(16)).clamp(0, 1)
        assert (kept == 0).any()
        assert (kept == 1).any()
        with comrope.scaled(rope, scaling):
            torch.testing.assert_close(rope.spectrum()[1], w * (kept + (1 - kept) / s))
    assert YaRN((4.0, 1.0), 1.0).attention_scaling(2) == pytest.approx(0.1 * math.log(4) + 1)
    assert YaRN(4.0, 1.0).attention_scaling(2) == pytest.approx(0.1 * math.log(16) + 1)
    assert YaRN(0.5, 1.0).attention_scaling(2) == 1.0
    assert YaRN(4.0, 1.0, attention_factor=2.0).attention_scaling(2) == 2.0


@pytest.mark.parametrize("factor", [2.0, (2.0, 5.0)])
def test_linear_is_a_division_of_positions(method, factor):
    """Also for matrices that do not commute."""
    for axes in (1, 2):
        if not fits(method, num_axes=axes) or (axes == 1 and isinstance(factor, tuple)):
            continue
        rope = make(method, num_axes=axes)
        q, k = queries_and_keys(rope)
        positions = torch.randn(6, axes, dtype=torch.float64)
        expected = scores(rope, q, k, positions / torch.tensor(factor))
        with comrope.scaled(rope, Linear(factor)):
            assert relative_error(scores(rope, q, k, positions), expected) < 1e-12


def test_planes_that_do_not_commute_cannot_be_scaled_alone():
    rope = make("liere")
    for scaling in (NTK(2.0), YaRN(2.0, 1.0)):
        with raises_for("scaling", naming="liere"), comrope.scaled(rope, scaling):
            pass


# Backends and gradients.


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("name", COMMUTING)
def test_backends_agree_while_scaled(name, block_size, scaling):
    """Scores and gradients, by the kernels too; a collinear rotation has no gradient by plane."""
    rope = make(name, block_size=block_size, head_dim=16)
    by_plane = not isinstance(scaling, Linear)
    if by_plane and block_size > 2 and name in ("comrope-ld", "comrope-ap"):
        with comrope.scaled(rope, scaling):
            with raises_for("scaling", naming="comrope-ld"):
                rope.angles()
            with torch.no_grad():
                rope.angles()
        for parameter in list(rope.method.parameters()):
            parameter.requires_grad_(False)
    with comrope.scaled(rope, scaling):
        if any(parameter.requires_grad for parameter in rope.parameters()) or name == "rope":
            assert_parity(rope)
            assert_kernel_parity(rope, torch.rand(6, 2))
        else:
            q, k = queries_and_keys(rope)
            found = []
            for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
                rope.to(dtype).backend = backend
                found.append(scores(rope, q.to(dtype), k.to(dtype), torch.ones(6, 2).cumsum(0)))
            assert relative_error(found[1], found[0]) < 1e-5


def test_factors_are_constants_for_the_gradient():
    rope = make("rope-mixed", num_axes=1, init=inits.RoPE(rotated_share=0.5))
    for scaling in (NTK(4.0), YaRN(4.0, 100.0)):
        with comrope.scaled(rope, scaling):
            scaled = rope.spectrum()[1]
            (gradient,) = torch.autograd.grad(scaled.sum(), rope.method.frequencies)
        w = rope.method.frequencies.detach()
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient * w, scaled.detach())
        assert (gradient[w == 0] == 1 / 4).all()  # they are slower than all others
        assert (w == 0).any()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)
def test_heads_that_share_parameters_are_scaled_alike(share, scaling):
    single, many = (
        make("comrope-ld", num_heads=heads, shared_heads=share and heads > 1, init="zeros")
        for heads in (1, 3)
    )
    with torch.no_grad():
        for rope in (single, many):
            rope.method.theta.fill_(1.0)
            rope.method.P.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        with comrope.scaled(single, scaling), comrope.scaled(many, scaling):
            expected = single.angle_matrices().expand(-1, 3, -1, -1, -1)
            torch.testing.assert_close(many.angle_matrices(), expected)


# The factor of queries and keys.


def test_the_attention_factor_reaches_scores_and_not_values():
    rope = make("comrope-torus", num_axes=1)
    q, k = (x.detach() for x in queries_and_keys(rope, groups=1))
    positions = torch.randn(6, 1, dtype=torch.float64)
    kept = YaRN(1.0, 1.0, attention_factor=3.0)  # a factor of 1: frequencies stay
    expected = rope(q, k, positions)
    turned = rope.rotate(q, positions)
    qkv = torch.cat((q, k, q), dim=1).transpose(1, 2)
    with comrope.scaled(rope, kept):
        for found in (rope(q, k, positions), rope.rotate_qkv(qkv, positions)[:2]):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, 3 * b)
        torch.testing.assert_close(rope.rotate_qkv(qkv, positions)[2], q)
        torch.testing.assert_close(rope.rotate(q, positions), turned)


# Wrong arguments.


@pytest.mark.parametrize(
    ("make_scaling", "argument"),
    [
        (lambda: Linear(0.0), "factor"),
        (lambda: Linear(float("nan")), "factor"),
        (lambda: NTK("4"), "factor"),
        (lambda: NTK((2.0, -1.0)), "factor"),
        (lambda: YaRN(2.0, 0.0), "original_length"),
        (lambda: YaRN(2.0, 64.0, beta_slow=0.0), "beta_slow"),
        (lambda: YaRN(2.0, 64.0, beta_fast=1.0), "beta_fast"),
        (lambda: YaRN(2.0, 64.0, attention_factor=-1.0), "attention_factor"),
    ],
)
def test_wrong_numbers_are_refused(make_scaling, argument):
    with raises_for(argument):
        make_scaling()


@pytest.mark.parametrize(
    ("model", "scaling", "error", "argument"),
    [
        (make("rope-mixed"), 4.0, TypeError, "scaling"),
        (make("rope-mixed"), Linear((2.0, 2.0, 2.0)), ValueError, "factor"),
        (make("rope-mixed"), YaRN(2.0, (1.0,)), ValueError, "original_length"),
        (torch.nn.Linear(2, 2), Linear(2.0), ValueError, "model"),
    ],
)
def test_what_cannot_be_scaled_is_refused_and_unchanged(model, scaling, error, argument):
    with raises_for(argument, error), comrope.scaled(model, scaling):
        pass
    assert all(rope.method.scaling is None for rope in rotary_modules(model).values())
