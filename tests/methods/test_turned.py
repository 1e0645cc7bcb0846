"""``init="turned"``: vanilla RoPE whose axes are turned, every head its own way."""

import pytest
import torch

import comrope

TURNING = ["rope-mixed", "liere", "comrope-ld", "comrope-torus"]


def made(method, init="turned", **options):
    options = {"num_heads": 3, "head_dim": 24, "block_size": 4, "base": 10.0, **options}
    return comrope.RotaryEmbedding(method, init=init, **options)


@pytest.mark.parametrize("method", TURNING)
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 14.0])
def test_turned_axes_are_an_orthogonal_mixture_of_vanilla_ones(method, axes, scale):
    """A_i = sum_j R_ij A_j with R orthogonal, so the sum of all A_i^T A_i stays."""
    options = {"num_axes": axes, "position_scale": scale}
    turned, vanilla = (made(method, i, **options).angle_matrices() for i in ("turned", "rope"))
    torch.testing.assert_close((turned.mT @ turned).sum(0), (vanilla.mT @ vanilla).sum(0))
    mixture = torch.einsum("ihmab,jhmab->hij", turned, vanilla)
    mixture = mixture / torch.einsum("jhmab,jhmab->hj", vanilla, vanilla)[:, None]
    eye = torch.eye(axes).expand(3, -1, -1)
    torch.testing.assert_close(mixture @ mixture.mT, eye, atol=1e-5, rtol=0)
    rebuilt = torch.einsum("hij,jhmab->ihmab", mixture, vanilla)
    torch.testing.assert_close(rebuilt, turned, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", TURNING)
def test_every_head_turns_its_own_way(method):
    matrices = made(method).angle_matrices()
    first, second, third = matrices.unbind(1)
    assert not torch.allclose(first, second, atol=1e-2)
    assert not torch.allclose(second, third, atol=1e-2)


def test_grids_of_two_sizes_are_turned_in_units_of_patches():
    matrices = made("comrope-torus", position_scale=(2.0, 5.0)).angle_matrices()
    in_patches = matrices / torch.tensor([2.0, 5.0]).view(2, 1, 1, 1, 1)
    vanilla = made("comrope-torus", "rope").angle_matrices()
    torch.testing.assert_close(
        (in_patches.mT @ in_patches).sum(0), (vanilla.mT @ vanilla).sum(0), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("method", TURNING)
def test_they_commute_and_learn(method):
    rope = made(method)
    assert comrope.analysis.commutator_norms(rope).max() < 1e-5
    q = torch.randn(1, 3, 4, 24)
    rope(q, q, torch.rand(4, 2))[0].square().sum().backward()
    assert all(p.grad is not None for p in rope.parameters())


def test_directions_are_spread_over_the_circle():
    """Four hundred heads: no direction is favoured, nor any sign."""
    frequencies = made("rope-mixed", num_heads=400).method.frequencies
    direction = torch.nn.functional.normalize(frequencies[:, :, 0, 0], dim=0)
    assert direction.mean(1).norm() < 0.15
    twice = torch.atan2(direction[1], direction[0]).mul(4)
    assert torch.stack((twice.cos(), twice.sin())).mean(1).norm() < 0.15


def test_methods_whose_blocks_keep_to_an_axis_cannot_turn():
    for method in ("rope", "comrope-ap"):
        with pytest.raises(ValueError, match=f"init: 'turned' wants blocks that turn.*{method}"):
            made(method)
    with pytest.raises(ValueError, match="init 'turned' shares the blocks of a head out"):
        made("comrope-ld", head_dim=20)


def test_in_a_vit_the_frequencies_count_patches():
    from comrope.models import create_model

    options = {"position": "comrope-torus", "num_classes": 2, "depth": 1}
    sizes = []
    for base in ("patch", "relative"):
        torch.manual_seed(0)
        vit = create_model(
            "vit_tiny_patch16_224", init="turned", position_units=base, base=100.0, **options
        )
        sizes.append(vit.blocks[0].attn.rope.angle_matrices())
    torch.testing.assert_close(sizes[0], 14 * sizes[1])


def test_theta_is_of_the_size_of_one_so_that_a_step_moves_it_as_from_other_starts():
    rope = made("comrope-ld", position_scale=14.0)
    torch.testing.assert_close(rope.method.theta.norm(dim=0), torch.ones(3, 6))
