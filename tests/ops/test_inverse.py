"""The inverse rotation, and rotated values: outputs of attention depend on relative positions."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    COMMUTING,
    fits,
    make,
    queries_and_keys,
    raises_for,
    relative_error,
    set_frequencies,
)
from torch import Tensor

import comrope

WIDE = torch.float64


def attended(rope, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **options) -> Tensor:
    """Return attention with rotated values, (B, H G, T, D)."""
    groups = q.shape[1] // k.shape[1]
    q, k = rope(q, k, positions, **options)
    v = rope.rotate(v, positions, **options)
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return rope.rotate(weights @ v, positions, inverse=True, **options)


def by_pairs(rope, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Compute the definition, one matrix per pair of tokens: sum_j a_ij R(x_i)^T R(x_j) v_j."""
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    blocks = rope.rotation_matrices(positions)  # (T, H, m, b, b)
    whole = torch.stack([torch.stack([torch.block_diag(*m) for m in token]) for token in blocks])
    whole = whole.repeat_interleave(groups, dim=1)  # (T, H G, D, D)
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    between = torch.einsum("ihca,jhcd->hijad", whole, whole)
    scores = torch.einsum("bhia,hijad,bhjd->bhij", q, between, k) / q.shape[-1] ** 0.5
    assert scores.shape[1] == heads * groups
    return torch.einsum("bhij,hijad,bhjd->bhia", scores.softmax(-1), between, v)


def vectors(rope, **options) -> tuple[Tensor, Tensor, Tensor]:
    q, k = queries_and_keys(rope, **options)
    return q, k, torch.randn_like(k).requires_grad_()


def with_gradients(rope, inputs, positions: Tensor, function=attended) -> dict[str, Tensor]:
    wanted = dict(zip("qkv", inputs, strict=True)) | {"positions": positions}
    wanted |= dict(rope.named_parameters())
    out = function(rope, *inputs, positions)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad((out.tanh() * weights).sum(), [*wanted.values()])
    return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}


def assert_like_the_definition(rope, backend: str = "auto") -> None:
    inputs, axes = vectors(rope), rope.num_axes
    positions = torch.randn(6, axes, dtype=WIDE, requires_grad=True)
    rope.backend = backend
    got = with_gradients(rope, inputs, positions)
    rope.backend = "reference"
    expected = with_gradients(rope, inputs, positions, by_pairs)
    for name, value in expected.items():
        assert relative_error(got[name], value) < (1e-12 if name == "out" else 1e-9), name


def test_values_and_gradients_are_those_of_the_definition(method):
    for block_size, init in ((2, "normal"), (3, "zeros"), (8, "normal")):
        if not fits(method, init=init):
            continue
        assert_like_the_definition(make(method, block_size=block_size, head_dim=48, init=init))


def test_the_reference_is_the_definition_too(method):
    assert_like_the_definition(make(method, head_dim=16), backend="reference")


@pytest.mark.parametrize("name", ["comrope-ap", "comrope-ld"])
def test_where_a_basis_is_not_smooth(name):
    for frequencies in ((1.0, 1.0), (2.0, 0.0), (1.5, 1.5 + 1e-9)):
        rope = make(name, block_size=4, head_dim=16)
        set_frequencies(rope, torch.tensor(frequencies, dtype=WIDE))
        assert_like_the_definition(rope)


# Every pair of channel order, backend, prefix and shape of the positions.
COVERING = [
    ("interleaved", "auto", 0, (6, 2)),
    ("interleaved", "reference", 2, (2, 6, 2)),
    ("half", "auto", 2, (2, 6, 2)),
    ("half", "reference", 0, (6, 2)),
    ("half", "auto", 0, (2, 6, 2)),
    ("interleaved", "auto", 2, (6, 2)),
]


def test_it_inverts_the_rotation(method):
    for order, backend, prefix, shape in COVERING:
        rope = make(method, channel_order=order, backend=backend, num_prefix_tokens=prefix)
        positions = 10 * torch.randn(shape, dtype=WIDE)
        for x in queries_and_keys(rope):
            rotated = rope.rotate(x, positions)
            assert relative_error(rope.rotate(rotated, positions, inverse=True), x) < 1e-12
            back = rope.rotate(x, positions, inverse=True)
            assert relative_error(rope.rotate(back, positions), x) < 1e-12
            assert relative_error(rope.rotate(rotated, positions + 1, inverse=True), x) > 0.1


def test_positions_of_any_kind_and_reach(method):
    """Parameters are float32: a rotation and its inverse must round them alike."""
    for positions in (
        1e3 * torch.linspace(-1, 1, 12, dtype=WIDE).view(6, 2),
        torch.arange(12, dtype=torch.uint8).view(6, 2),
        torch.arange(-6, 6).view(6, 2),
    ):
        rope = make(method, dtype=torch.float32, block_size=8)
        x = torch.randn(1, 2, 6, 96, dtype=WIDE)
        rotated = rope.rotate(x, positions)
        assert relative_error(rope.rotate(rotated, positions, inverse=True), x) < 1e-9


def test_outputs_are_invariant_to_an_offset_if_matrices_commute(method):
    rope = make(method)
    inputs, positions = vectors(rope), torch.randn(6, 2, dtype=WIDE)
    before = attended(rope, *inputs, positions)
    change = relative_error(attended(rope, *inputs, positions + 3.7), before)
    assert change < 1e-11 if method in COMMUTING else change > 1e-2


def test_without_the_inverse_outputs_change():
    rope = make("comrope-torus")
    q, k, v = vectors(rope, groups=1)
    positions = torch.randn(6, 2, dtype=WIDE)

    def without(positions):
        a, b = rope(q, k, positions)
        return (a @ b.mT).softmax(-1) @ rope.rotate(v, positions)

    assert relative_error(without(positions + 3.7), without(positions)) > 0.1


def test_low_precision_is_rounded_once(method):
    rope = make(method, dtype=torch.float32, block_size=8)
    x = torch.randn(2, 2, 6, 96).bfloat16()
    positions = 50 * torch.rand(6, 2)
    wide = rope.rotate(x.float(), positions, inverse=True)
    assert torch.equal(rope.rotate(x, positions, inverse=True), wide.bfloat16())


KERNELS = [
    ("rope", 2, "interleaved"),
    ("rope-mixed", 8, "half"),
    ("comrope-ap", 2, "half"),
    ("comrope-ld", 8, "interleaved"),
    ("comrope-torus", 8, "half"),
]
MORE_KERNELS = [
    (name, b, order)
    for name in comrope.METHODS
    for b in (2, 8)
    for order in ("interleaved", "half")
    if (name, b, order) not in KERNELS and (name in COMMUTING or order != "half")
]


@pytest.mark.parametrize(
    ("name", "block_size", "order"),
    [*KERNELS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_KERNELS)],
)
def test_the_kernels_agree(name, block_size, order):
    """Interpreted, in float32: values, and all gradients."""
    rope = make(name, block_size=block_size, head_dim=16, dtype=torch.float32, channel_order=order)
    inputs = [x.detach().float().requires_grad_() for x in vectors(rope)]
    positions = torch.randn(6, 2, requires_grad=True)
    rope.backend = "triton"
    got = with_gradients(rope, inputs, positions)
    rope.backend = "spectral" if name in COMMUTING else "reference"
    for label, value in with_gradients(rope, inputs, positions).items():
        assert relative_error(got[label], value) < 1e-4, label


def test_general_matrices_have_no_kernel_for_the_half_order():
    rope = make("liere", dtype=torch.float32, channel_order="half")
    rope.backend = "triton"
    with raises_for("backend"):
        rope.rotate(torch.randn(1, 2, 6, 48), torch.randn(6, 2), inverse=True)


def test_bad_input_is_named():
    rope = make("comrope-torus")
    x, positions = torch.randn(1, 2, 6, 48), torch.randn(6, 2)
    with raises_for("positions"):
        rope.rotate(x, torch.randn(6, 3), inverse=True)
    for heads in (0, 1, 3):
        with raises_for("x"):
            rope.rotate(torch.randn(1, heads, 6, 48), positions)
    with raises_for("x"):
        rope.rotate(torch.randn(1, 2, 6, 32), positions)
    with raises_for("x", TypeError):
        rope.rotate([1.0], positions)
    with raises_for("weight"):
        rope._inverse_with_projection(x, positions, torch.randn(96, 48))
    with raises_for("weight", TypeError):
        rope._inverse_with_projection(x, positions, torch.nn.Linear(96, 5))


def test_a_projection_may_take_the_basis(method):
    """Instead of every token: the same values and gradients."""
    for block_size, backend, order in (
        (2, "auto", "interleaved"),
        (2, "reference", "half"),
        (3, "auto", "half"),
        (3, "reference", "interleaved"),
        (8, "auto", "half"),
        (8, "auto", "interleaved"),
    ):
        rope = make(
            method, block_size=block_size, head_dim=48, backend=backend, channel_order=order,
            num_prefix_tokens=1,
        )  # fmt: skip
        x, weight = torch.randn(2, 4, 6, 48, dtype=WIDE), torch.randn(7, 4 * 48, dtype=WIDE)
        positions = torch.randn(6, 2, dtype=WIDE)
        inputs = [each.requires_grad_() for each in (x, weight, positions)]
        wanted = [*inputs, *rope.parameters()]

        def projected(x, weight, wanted=wanted):
            out = x.transpose(1, 2).flatten(2) @ weight.mT
            return out, *torch.autograd.grad(out.tanh().square().sum(), wanted)

        expected = projected(rope.rotate(x, positions, inverse=True), weight)
        rotated, instead = rope._inverse_with_projection(x, positions, weight)
        for a, b in zip(projected(rotated, instead), expected, strict=True):
            assert relative_error(a, b) < 1e-11
        no_basis = getattr(rope.angles(), "basis", True) is None or method not in COMMUTING
        has_basis = block_size > 2 and not no_basis
        assert (instead is not weight) == (has_basis and backend == "auto")


def test_a_projection_in_low_precision_is_rounded_once():
    rope = make("comrope-torus", dtype=torch.float32, block_size=8)
    x, weight = torch.randn(2, 2, 6, 96).bfloat16(), torch.randn(5, 192).bfloat16()
    positions = torch.rand(6, 2)
    rotated, instead = rope._inverse_with_projection(x, positions, weight)
    wide = rope._inverse_with_projection(x.float(), positions, weight.float())
    assert torch.equal(rotated, wide[0].bfloat16())
    assert torch.equal(instead, wide[1].bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comrope-ld", "comrope-torus", "rope-mixed"])
def test_compiled_whole_it_is_the_same_with_its_gradients(name):
    rope = make(name, head_dim=16, dtype=torch.float32)
    inputs = [x.detach().float().requires_grad_() for x in vectors(rope)]
    positions = torch.randn(6, 2, requires_grad=True)
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    got = with_gradients(rope, inputs, positions, compiled)
    for label, value in with_gradients(rope, inputs, positions).items():
        assert relative_error(got[label], value) < 1e-5, label
    torch.compiler.reset()
