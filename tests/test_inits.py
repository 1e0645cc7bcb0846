"""Initializations: names, objects, and the angle matrices that learned methods start with."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    COMMUTING,
    FROM_ZERO,
    assert_kernel_parity,
    assert_parity,
    fits,
    make,
    raises_for,
)

import comrope
from comrope import inits

ON_ONE_AXIS = [name for name in comrope.METHODS if fits(name, num_axes=1)]
MIXING = ["rope-mixed", "liere", "comrope-ld", "comrope-torus"]  # blocks rotate with all axes


def made(method, init, **options):
    options = {"num_heads": 3, "head_dim": 24, "block_size": 4, **options}
    return comrope.RotaryEmbedding(method, init=init, **options)


def angle_matrices(method, init, **options) -> torch.Tensor:
    torch.manual_seed(0)
    return made(method, init, **options).angle_matrices()


# Names, objects and keywords.


@pytest.mark.parametrize(
    ("name", "keywords", "init"),
    [
        ("normal", {"spread": 2.0}, inits.Normal(2.0)),
        ("zeros", {}, inits.Zeros()),
        ("rope", {"base": 10.0, "position_scale": (3, 4)}, inits.RoPE(10.0, (3, 4))),
        ("rope", {"frequencies": [1, 2, 3, 4, 5, 6]}, inits.RoPE(frequencies=[1, 2, 3, 4, 5, 6])),
        ("rope", {"rotated_share": 0.5}, inits.RoPE(rotated_share=0.5)),
        ("rope-random-axes", {"base": 10.0}, inits.RandomAxes(10.0)),
        ("isotropic", {"position_scale": 14.0}, inits.Isotropic(position_scale=14.0)),
    ],
)
def test_a_name_with_keywords_is_an_object(name, keywords, init):
    assert inits.parse(name, **keywords) == init
    expected = angle_matrices("rope-mixed", name, **keywords)
    assert torch.equal(angle_matrices("rope-mixed", init), expected)


def test_keywords_set_what_an_object_leaves_open():
    found = inits.parse(inits.RoPE(base=10.0), position_scale=14.0, base=None, spread=1.0)
    assert found == inits.RoPE(10.0, 14.0)
    with raises_for("base"):
        inits.parse(inits.RoPE(base=10.0), base=20.0)
    with raises_for("spread"):
        inits.parse(inits.RoPE(), spread=2.0)
    with raises_for("frequencies"):
        inits.parse("isotropic", frequencies=[1.0])


def test_a_misspelled_name_is_suggested():
    with pytest.raises(ValueError, match="did you mean 'rope-random-axes'"):
        inits.parse("rope_random_axes")
    with pytest.raises(ValueError, match="did you mean 'comrope-ld'"):
        made("comrope_ld", "normal")


@pytest.mark.parametrize(
    ("old", "new"), [("turned", inits.RandomAxes), ("scattered", inits.Isotropic)]
)
def test_old_names_warn(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old}.*{new.name}"):
        assert made("rope-mixed", old).method.init == new()


def test_vanilla_rope_takes_its_own_init_only():
    default, scaled = made("rope", "normal"), made("rope", inits.RoPE(100.0, 14.0))
    assert default.method.init == inits.RoPE()
    assert scaled.method.init == made("rope", "normal", base=100.0, position_scale=14.0).method.init
    assert not made("rope", inits.Zeros()).angle_matrices().any()
    with raises_for("init"):
        made("rope", inits.Normal(2.0))


@pytest.mark.parametrize("method", ["rope", "comrope-ap"])
@pytest.mark.parametrize("init", ["rope-random-axes", "isotropic"])
def test_blocks_that_rotate_with_one_axis_cannot_mix_axes(method, init):
    with raises_for("init"):
        made(method, init)


def test_the_axes_must_be_able_to_share_the_blocks():
    with raises_for("head_dim"):
        made("comrope-ld", "rope-random-axes", head_dim=20)
    made("comrope-ld", "isotropic", head_dim=20)  # five blocks, which nothing is shared of


@pytest.mark.parametrize("init", inits.NAMES)
def test_every_method_starts_with_every_initialization_or_refuses_it(method, init):
    try:
        rope = made(method, init)
    except ValueError as error:
        assert str(error).startswith(("init: ", "num_axes: "))  # noqa: PT017
        return
    matrices = rope.angle_matrices().detach()
    assert matrices.isfinite().all()
    assert torch.equal(matrices, -matrices.mT)
    assert bool(matrices.any()) == (init != "zeros")
    if isinstance(rope.method.init, inits.PlaneInit) or method in COMMUTING:
        assert comrope.analysis.commutator_norms(rope).max() < 1e-5


# Vanilla RoPE on one axis, and p-RoPE.


def frequencies(rope) -> torch.Tensor:
    """Return the frequencies of every axis and head, descending: (N, H, D // 2)."""
    found = comrope.analysis.axis_frequencies(rope).flatten(2)
    return found.sort(descending=True).values


@pytest.mark.parametrize("base", [1.0, 16.0, 500.0, 1e6])
@pytest.mark.parametrize("block_size", [2, 8])
@pytest.mark.parametrize("method", ON_ONE_AXIS)
def test_on_one_axis_every_method_starts_with_roformers_frequencies(method, block_size, base):
    sizes = {"num_axes": 1, "block_size": block_size, "head_dim": 48}
    found = frequencies(make(method, init="rope", base=base, **sizes))
    expected = base ** (-torch.arange(24, dtype=torch.float64) / 24)
    torch.testing.assert_close(found, expected.expand(1, 2, 24), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.29, 0.75, 1.0])
@pytest.mark.parametrize("method", ON_ONE_AXIS)
def test_p_rope_is_the_proportional_rope_of_transformers(method, share):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=96, num_attention_heads=2, head_dim=48)
    config.rope_parameters = {
        "rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": share,
    }  # fmt: skip
    theirs = utils.ROPE_INIT_FUNCTIONS["proportional"](config, torch.device("cpu"))[0]
    init = inits.RoPE(500.0, rotated_share=share)
    ours = frequencies(make(method, num_axes=1, block_size=4, head_dim=48, init=init))
    torch.testing.assert_close(ours, theirs.double().expand(1, 2, 24), rtol=1e-6, atol=1e-15)


def test_p_rope_keeps_the_highest_frequencies_of_every_axis():
    for given in (None, [0.1, 3, 2, 5, 4, 6]):
        options = {"num_heads": 1, "block_size": 2, "head_dim": 24, "frequencies": given}
        whole, half = (
            frequencies(make("rope", rotated_share=share, **options)) for share in (None, 0.5)
        )
        assert torch.equal(half[..., :3], whole[..., :3])
        assert not half[..., 3:].any()
    mixed = made("comrope-torus", inits.RandomAxes(rotated_share=0.5)).spectrum()[1].norm(dim=0)
    assert (mixed == 0).sum((-2, -1)).tolist() == [6, 6, 6]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "half"])
def test_a_share_is_from_zero_to_one(share):
    with raises_for("rotated_share"):
        made("rope-mixed", "rope", rotated_share=share)
    with raises_for("rotated_share"):
        made("rope-mixed", "normal", rotated_share=0.5)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", FROM_ZERO)
def test_planes_that_do_not_rotate_learn_to(name, share):
    """Their gradients are those of the reference, and not zero: on the CPU and in the kernels."""
    for axes in (1, 2):
        if not fits(name, num_axes=axes):
            continue
        options = {"num_axes": axes, "block_size": 4, "head_dim": 16}
        rope = make(name, init=inits.RoPE(base=100.0, rotated_share=share), **options)
        positions = 3 * torch.randn(6, axes, dtype=torch.float64)
        if rope.method.commutes or axes == 1:
            assert_parity(rope, positions.clone())
        assert (frequencies(rope) > 0).sum() == 2 * int(8 * share)
        q = torch.randn(1, 2, 6, 16, dtype=torch.float64)
        torch.tanh(comrope.analysis.scores(rope, q, q.flip(2), positions)).sum().backward()
        with torch.no_grad():
            for parameter in rope.parameters():
                parameter -= 0.01 * parameter.grad
        assert (frequencies(rope) > 1e-6).sum() >= 2 * 8  # every plane, with one axis or more
        assert_kernel_parity(rope, positions)


# Random axes.


@pytest.mark.parametrize("method", MIXING)
def test_random_axes_are_an_orthogonal_mixture_of_vanilla_ones(method):
    """A_i = sum_j R_ij A_j with R orthogonal, so the sum of all A_i^T A_i stays."""
    for axes, scale in ((1, 14.0), (2, 1.0), (2, 14.0), (3, 1.0)):
        mixed, vanilla = (
            angle_matrices(method, init(10.0, scale), num_axes=axes)
            for init in (inits.RandomAxes, inits.RoPE)
        )
        torch.testing.assert_close((mixed.mT @ mixed).sum(0), (vanilla.mT @ vanilla).sum(0))
        mixture = torch.einsum("ihmab,jhmab->hij", mixed, vanilla)
        mixture = mixture / torch.einsum("jhmab,jhmab->hj", vanilla, vanilla)[:, None]
        eye = torch.eye(axes).expand(3, -1, -1)
        torch.testing.assert_close(mixture @ mixture.mT, eye, atol=1e-5, rtol=0)
        rebuilt = torch.einsum("hij,jhmab->ihmab", mixture, vanilla)
        torch.testing.assert_close(rebuilt, mixed, atol=1e-5, rtol=1e-5)


def test_grids_of_two_sizes_are_rotated_in_units_of_patches():
    matrices = angle_matrices("comrope-torus", inits.RandomAxes(10.0, (2.0, 5.0)))
    in_patches = matrices / torch.tensor([2.0, 5.0]).view(2, 1, 1, 1, 1)
    vanilla = angle_matrices("comrope-torus", inits.RoPE(10.0))
    torch.testing.assert_close(
        (in_patches.mT @ in_patches).sum(0), (vanilla.mT @ vanilla).sum(0), atol=1e-5, rtol=1e-5
    )


def test_random_directions_are_spread_over_the_circle():
    """Four hundred heads: no direction is favoured, nor any sign."""
    frequencies = made("rope-mixed", "rope-random-axes", num_heads=400).method.frequencies
    direction = torch.nn.functional.normalize(frequencies[:, :, 0, 0], dim=0)
    assert direction.mean(1).norm() < 0.15
    angle = torch.atan2(direction[1], direction[0]).mul(4)
    assert torch.stack((angle.cos(), angle.sin())).mean(1).norm() < 0.15


# Isotropic.


@pytest.mark.parametrize("method", MIXING)
def test_isotropic_speeds_are_log_uniform_up_to_the_scale(method):
    for axes in (1, 3):
        init = inits.Isotropic(10.0, 16.0)
        matrices = angle_matrices(method, init, num_axes=axes, num_heads=200)
        squares = (matrices.mT @ matrices).sum(0).diagonal(dim1=-2, dim2=-1)
        logs = (squares[..., ::2].sqrt() / 16).log10()  # (H, m, f), along the steepest direction
        assert -1 - 1e-4 <= logs.min() < -0.99
        assert -0.01 < logs.max() <= 1e-4
        quarters = torch.histc(logs, 4, -1, 0) / logs.numel()
        assert (quarters - 0.25).abs().max() < 0.05


def test_isotropic_directions_are_the_planes_own():
    init = inits.Isotropic(10.0)
    frequencies = made("comrope-torus", init, num_heads=100).method.frequencies.detach()
    direction = torch.nn.functional.normalize(frequencies, dim=0)
    assert direction.flatten(1).mean(1).norm() < 0.1
    cosines = (direction[..., 0] * direction[..., 1]).sum(0)
    assert cosines.abs().mean() == pytest.approx(2 / torch.pi, abs=0.08)
    of_blocks = made("comrope-ld", init, num_heads=100).method.theta.detach()
    assert torch.nn.functional.normalize(of_blocks, dim=0).flatten(1).mean(1).norm() < 0.15


# Both.


@pytest.mark.parametrize("init", ["rope-random-axes", "isotropic"])
@pytest.mark.parametrize("method", MIXING)
def test_they_differ_by_head_commute_and_learn(method, init):
    rope = made(method, init)
    first, second, third = rope.angle_matrices().unbind(1)
    assert not torch.allclose(first, second, atol=1e-2)
    assert not torch.allclose(second, third, atol=1e-2)
    assert comrope.analysis.commutator_norms(rope).max() < 1e-5
    q = torch.randn(1, 3, 4, 24)
    rope(q, q, torch.rand(4, 2))[0].square().sum().backward()
    assert all(p.grad is not None for p in rope.parameters())


@pytest.mark.parametrize("init", ["rope", "rope-random-axes", "isotropic"])
def test_theta_is_of_size_one_at_any_scale(init):
    """So that a step of the optimizer moves it as much as from other initializations."""
    theta = made("comrope-ld", init, position_scale=14.0).method.theta
    torch.testing.assert_close(theta.norm(dim=0), torch.ones(3, 6))


def test_in_a_vit_the_frequencies_count_patches():
    from comrope.models import create_model

    options = {"position": "comrope-torus", "num_classes": 2, "depth": 1, "base": 100.0}
    found = []
    for units in ("patch", "relative"):
        torch.manual_seed(0)
        options |= {"init": "rope-random-axes", "position_units": units}
        vit = create_model("vit_tiny_patch16_224", **options)
        found.append(vit.blocks[0].attn.rope.angle_matrices())
    torch.testing.assert_close(found[0], 14 * found[1])
