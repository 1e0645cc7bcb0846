"""The base class of methods: what their classes declare, and what it checks."""

from __future__ import annotations

import torch
from helpers import make, raises_for

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
