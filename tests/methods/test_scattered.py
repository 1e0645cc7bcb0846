"""``init="scattered"``: directions spread over the sphere, speeds log-uniform."""

import pytest
import torch

import comrope

SCATTERING = ["rope-mixed", "liere", "comrope-ld", "comrope-torus"]


def made(method, **options):
    options = {"num_heads": 3, "head_dim": 24, "block_size": 4, "base": 10.0, **options}
    return comrope.RotaryEmbedding(method, init="scattered", **options)


def speeds_of(rope) -> torch.Tensor:
    """(H, m, f), how fast the phase of each plane grows along its steepest direction."""
    matrices = rope.angle_matrices()
    squares = (matrices.mT @ matrices).sum(0).diagonal(dim1=-2, dim2=-1)
    return squares[..., ::2].sqrt()


@pytest.mark.parametrize("method", SCATTERING)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_speeds_are_log_uniform_up_to_the_scale(method, axes):
    rope = made(method, num_axes=axes, num_heads=200, position_scale=16.0)
    logs = (speeds_of(rope) / 16).log10()
    assert -1 - 1e-4 <= logs.min() < -0.99
    assert -0.01 < logs.max() <= 1e-4
    quarters = torch.histc(logs, 4, -1, 0) / logs.numel()
    assert (quarters - 0.25).abs().max() < 0.05


def test_every_plane_goes_its_own_way():
    frequencies = made("comrope-torus", num_heads=100).method.frequencies.detach()
    direction = torch.nn.functional.normalize(frequencies, dim=0)
    assert direction.flatten(1).mean(1).norm() < 0.1
    cosines = (direction[..., 0] * direction[..., 1]).sum(0)
    assert cosines.abs().mean() == pytest.approx(2 / torch.pi, abs=0.08)
    of_blocks = made("comrope-ld", num_heads=100).method.theta.detach()
    assert torch.nn.functional.normalize(of_blocks, dim=0).flatten(1).mean(1).norm() < 0.15


@pytest.mark.parametrize("method", SCATTERING)
def test_they_commute_and_learn(method):
    rope = made(method, num_axes=2, head_dim=20)  # five blocks, which two axes could not share
    assert comrope.analysis.commutator_norms(rope).max() < 1e-5
    q = torch.randn(1, 3, 4, 20)
    rope(q, q, torch.rand(4, 2))[0].square().sum().backward()
    assert all(p.grad is not None for p in rope.parameters())


def test_what_cannot_be_scattered_is_refused():
    for method in ("rope", "comrope-ap"):
        with pytest.raises(ValueError, match=f"init: 'scattered' wants blocks that turn.*{method}"):
            made(method)
    with pytest.raises(ValueError, match="frequencies: expected None, since init 'scattered'"):
        made("rope-mixed", base=None, frequencies=[1.0] * 6)
