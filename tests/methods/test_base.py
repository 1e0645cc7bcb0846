"""The base class of methods: what their classes declare, and what it checks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import make, raises_for, relative_error

import comrope
import comrope.scaling
from comrope import RotaryEmbedding, inits
from comrope.analysis import commutator_norms
from comrope.angles import plane_generators
from comrope.inits import Shape
from comrope.methods import has_vanilla_frequencies, label, method_class
from comrope.methods.rope_mixed import RoPEMixed

SIZES = {"num_heads": 2, "head_dim": 16, "block_size": 4}


def count(rope: RotaryEmbedding) -> int:
    return sum(p.numel() for p in rope.parameters())


class GivenPlanes(inits.PlaneInit):
    """Every plane has a direction and a speed of its own."""

    name = "given"

    def planes(self, shape: Shape, like: torch.Tensor) -> inits.PlaneFrequencies:
        sizes = (shape.num_axes, shape.num_heads, shape.num_blocks, shape.num_planes)
        generator = torch.Generator().manual_seed(7)
        direction = torch.randn(sizes, generator=generator, dtype=torch.float64)
        return inits.PlaneFrequencies(direction, torch.ones(sizes[1:], dtype=torch.float64))


def test_a_class_is_what_it_declares(method):
    cls, rope = method_class(method), make(method)
    assert cls.name == method
    assert cls.learns == bool(count(rope))
    assert cls.commutes == bool(commutator_norms(rope).max() < 1e-12)
    assert not cls.axis_partitioned or ((rope.angle_matrices() != 0).sum(0) < 2).all()
    small_blocks = make(method, block_size=2, head_dim=rope.head_dim)
    assert cls.block_size_matters or count(small_blocks) == count(rope)
    if cls.direction_per_plane:
        rope = make(method, init=GivenPlanes())
        planes = rope.method.init.planes(rope.method.shape, torch.empty(0))
        expected = plane_generators(planes.direction * planes.speed, rope.block_size)
        torch.testing.assert_close(rope.angle_matrices().detach(), expected)


def test_a_label_is_by_default_the_name(monkeypatch):
    monkeypatch.setattr(RoPEMixed, "label", "")
    assert label("rope-mixed") == "rope-mixed"


def test_the_heads_of_every_parameter_are_declared():
    class Unfinished(RoPEMixed):
        head_axis = {"weights": 1}  # noqa: RUF012

    with raises_for("head_axis", TypeError, naming="Unfinished"):
        Unfinished(**SIZES)


def test_what_a_class_cannot_do_is_refused():
    class Flat(RoPEMixed):
        name, only_axes, starts_at_zero = "flat", 2, False

    assert Flat(**SIZES).num_axes == 2
    with raises_for("num_axes", naming="flat"):
        Flat(num_axes=3, **SIZES)
    with raises_for("init", naming="flat"):
        Flat(init="zeros", **SIZES)


def test_an_initialization_of_no_known_kind_is_refused():
    class Odd(inits.Init):
        name = "odd"

    with raises_for("init", TypeError, naming="Odd"):
        RoPEMixed(init=Odd(), **SIZES)


def test_vanilla_frequencies_are_those_of_vanilla_rope_and_of_plane_inits():
    assert has_vanilla_frequencies("rope", "normal")
    assert has_vanilla_frequencies("comrope-ld", "rope")
    assert not has_vanilla_frequencies("comrope-ld", "normal")
    assert not has_vanilla_frequencies("comrope-ld", "zeros")


@pytest.fixture
def decompositions(monkeypatch):
    """A list that grows with every eigendecomposition."""
    calls, ours = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: calls.append(1) or ours(x))
    return calls


def test_one_decomposition_without_gradients_until_parameters_change(decompositions):
    rope = comrope.RotaryEmbedding("comrope-ld", num_heads=2, head_dim=16)
    q, positions = torch.randn(1, 2, 5, 16), torch.rand(5, 2)

    def output():
        with torch.no_grad():
            return rope(q, q, positions)[0]

    def changes():
        """Ways to change parameters, some of which torch's version counter misses."""
        yield lambda: torch.optim.SGD(rope.parameters(), lr=0.1).step()
        yield lambda: rope.method.P.data.mul_(1.1)
        yield lambda: setattr(rope.method.P, "data", rope.method.P.data * 1.1)
        yield lambda: rope.load_state_dict({k: 2 * v for k, v in rope.state_dict().items()})
        yield rope.reset_parameters
        yield rope.double
        yield rope.float

    rope(q, q, positions)[0].sum().backward()
    decompositions.clear()
    first = output()
    assert torch.equal(first, output())
    assert len(decompositions) == 1
    for change in changes():
        change()
        decompositions.clear()
        now = output()
        assert len(decompositions) == 1
        assert torch.equal(now, rope(q, q, positions)[0])  # computed anew
    with torch.inference_mode():
        output()
    rope(q, q, positions)[0].sum().backward()  # what inference mode kept is not used here
    rope.method.P.requires_grad_(False)
    x = q.clone().requires_grad_()
    rope(x, x, positions, angles=rope.angles())[0].sum().backward()


def test_kept_angles_are_not_copied():
    rope = comrope.RotaryEmbedding("comrope-ld", num_heads=2, head_dim=16)
    size = len(pickle.dumps(rope))
    with torch.no_grad():
        rope.angles()
    assert rope.method._kept is not None
    assert copy.deepcopy(rope).method._kept is None
    assert len(pickle.dumps(rope)) == size
    with comrope.scaled(rope, comrope.scaling.Linear(2.0)), torch.no_grad():
        scaled = rope.angles().direction
    with torch.no_grad():
        assert relative_error(rope.angles().direction, 2 * scaled) < 1e-6
