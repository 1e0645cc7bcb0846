from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, fits, make

import comrope
from comrope import analysis


def test_commutators_of_known_matrices():
    """Rotations about x and y in three dimensions: [X, Y] = Z, all of norm sqrt(2)."""
    rope = make("liere", num_heads=1, head_dim=3, block_size=3)
    x, y = torch.zeros(3, 3), torch.zeros(3, 3)
    x[2, 1], y[0, 2] = 1.0, 1.0
    with torch.no_grad():
        rope.method.P.copy_(torch.stack((x, y))[:, None, None])
    norms = analysis.commutator_norms(rope)[:, :, 0, 0]
    expected = torch.tensor([[0.0, 0.5**0.5], [0.5**0.5, 0.0]]).double()
    torch.testing.assert_close(norms, expected)


@pytest.mark.parametrize("method", [m for m in comrope.METHODS if fits(m, init="zeros")])
def test_commutators_of_zero_matrices_are_zero(method):
    assert (analysis.commutator_norms(make(method, init="zeros")) == 0).all()


def test_the_rope_equation_separates_liere_from_the_rest(method):
    rope = make(method, block_size=8)
    x, y = (torch.randn(4, 2, dtype=torch.float64) for _ in "xy")
    error = analysis.rope_equation_error(rope, x, y)
    assert error.shape == (4, 2, 12)
    assert (error.max() < 1e-11) if method in COMMUTING else (error.max() > 0.1)


def test_axis_frequencies_are_those_of_the_spectrum(commuting):
    for axes in [axes for axes in (2, 3) if fits(commuting, num_axes=axes)]:
        rope = make(commuting, block_size=5, num_axes=axes)
        joint = rope.spectrum()[1].abs().sort(descending=True).values
        torch.testing.assert_close(analysis.axis_frequencies(rope), joint.detach())


def test_axis_frequencies_of_liere_are_eigenvalues():
    rope = make("liere", block_size=4)
    eigenvalues = torch.linalg.eigvals(rope.angle_matrices()).imag
    expected = eigenvalues.sort(descending=True).values[..., :2]
    torch.testing.assert_close(analysis.axis_frequencies(rope), expected.detach())


@pytest.mark.parametrize("method", [m for m in comrope.METHODS if fits(m, num_axes=1)])
def test_wavelengths_are_ascending_and_infinite_without_rotation(method):
    options = {"block_size": 4, "head_dim": 16, "rotated_share": 0.75}
    rope = make(method, init="rope", base=16.0, num_axes=1, **options)
    expected = 2 * torch.pi * 16.0 ** (torch.arange(8.0).double() / 8)
    expected[6:] = torch.inf
    torch.testing.assert_close(analysis.wavelengths(rope), expected.expand(1, 2, -1))


def test_similarity_is_the_mean_cosine_of_the_phases(commuting):
    rope = make(commuting)
    positions = torch.rand(7, 2, dtype=torch.float64)
    origin = torch.tensor([0.3, 0.6], dtype=torch.float64)
    phases = torch.einsum("tn,nhmf->htmf", positions - origin, rope.spectrum()[1])
    found = analysis.similarity_map(rope, positions, origin)
    torch.testing.assert_close(found, phases.cos().mean((-2, -1)).detach())


def test_offset_sensitivity_takes_the_users_own_queries():
    rope = make("liere")
    positions = comrope.grid((2, 2), dtype=torch.float64)
    q, k = (torch.randn(1, 2, 4, 48, dtype=torch.float64) for _ in "qk")
    moved = analysis.scores(rope, q, k, positions + 1.0) - analysis.scores(rope, q, k, positions)
    expected = moved.abs().max() / analysis.scores(rope, q, k, positions).std()
    found = analysis.offset_sensitivity(rope, positions, 1.0, q=q, k=k)
    assert found == pytest.approx(float(expected.detach()))


def test_every_embedding_of_a_model_is_found():
    layer = torch.nn.ModuleDict({"attention": make("comrope-ld"), "mlp": torch.nn.Linear(2, 2)})
    model = torch.nn.Sequential(layer, make("rope"))
    assert list(analysis.rotary_modules(model)) == ["0.attention", "1"]


def test_offset_sensitivity_takes_any_positions():
    rope = make("comrope-ld")
    assert analysis.offset_sensitivity(rope, torch.rand(3, 4, 2, dtype=torch.float64), 1.0) < 1e-10
    assert analysis.offset_sensitivity(rope, torch.arange(8).view(4, 2), 1) < 1e-3


def test_plain_numbers_do_for_places_and_offsets():
    rope, positions = make("liere"), comrope.grid((3, 3), dtype=torch.float64)
    seen = analysis.similarity_map(rope, positions, (0.5, 0.5))
    torch.testing.assert_close(seen, analysis.similarity_map(rope, positions, positions[4]))
    q, k = (torch.randn(1, 2, 9, 48, dtype=torch.float64) for _ in "qk")
    moves = [
        analysis.offset_sensitivity(rope, positions, offset, q=q, k=k)
        for offset in ((0.1, 0.2), torch.tensor([0.1, 0.2]).double())
    ]
    assert moves[0] == pytest.approx(moves[1], rel=1e-6)


def test_a_model_is_not_an_embedding():
    with pytest.raises(TypeError, match=r"^rope: "):
        analysis.commutator_norms(torch.nn.Linear(2, 2))
