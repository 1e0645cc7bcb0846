"""Rotated values: attention whose outputs, not only its scores, depend on relative positions."""

from __future__ import annotations

import pytest
import torch
from helpers import make, queries_and_keys, raises_for, relative_error, set_frequencies
from torch import Tensor

WIDE = torch.float64


def attended(rope, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **options) -> Tensor:
    """(B, H G, T, D), the values turned as well."""
    groups = q.shape[1] // k.shape[1]
    q, k = rope(q, k, positions, **options)
    v = rope.rotate(v, positions, **options)
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return rope.rotate(weights @ v, positions, inverse=True, **options)


def by_pairs(rope, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The definition, one matrix a pair of tokens: sum_j a_ij R(x_i)^T R(x_j) v_j."""
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


@pytest.mark.parametrize("block_size", [2, 3, 8])
@pytest.mark.parametrize("init", ["normal", "zeros"])
def test_values_and_gradients_are_those_of_the_definition(method, block_size, init):
    assert_like_the_definition(make(method, block_size=block_size, head_dim=48, init=init))


def test_the_reference_is_the_definition_too(method):
    assert_like_the_definition(make(method, head_dim=16), backend="reference")


@pytest.mark.parametrize("frequencies", [(1.0, 1.0), (2.0, 0.0), (1.5, 1.5 + 1e-9)])
@pytest.mark.parametrize("name", ["comrope-ap", "comrope-ld"])
def test_where_a_basis_is_not_smooth(name, frequencies):
    rope = make(name, block_size=4, head_dim=16)
    set_frequencies(rope, torch.tensor(frequencies, dtype=WIDE))
    assert_like_the_definition(rope)


@pytest.mark.parametrize("order", ["interleaved", "half"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("shape", [(6, 2), (2, 6, 2)])
def test_it_inverts_the_rotation(method, order, backend, prefix, shape):
    rope = make(method, channel_order=order, backend=backend, num_prefix_tokens=prefix)
    positions = 10 * torch.randn(shape, dtype=WIDE)
    for x in queries_and_keys(rope):
        turned = rope.rotate(x, positions)
        assert relative_error(rope.rotate(turned, positions, inverse=True), x) < 1e-12
        back = rope.rotate(x, positions, inverse=True)
        assert relative_error(rope.rotate(back, positions), x) < 1e-12
        assert relative_error(rope.rotate(turned, positions + 1, inverse=True), x) > 0.1


@pytest.mark.parametrize("positions", [
    1e3 * torch.linspace(-1, 1, 12, dtype=WIDE).view(6, 2),
    torch.arange(12, dtype=torch.uint8).view(6, 2),
    torch.arange(-6, 6).view(6, 2),
])  # fmt: skip
def test_positions_of_any_kind_and_reach(method, positions):
    """Parameters are float32: what is turned and what turns it back must round them alike."""
    rope = make(method, dtype=torch.float32, block_size=8)
    x = torch.randn(1, 2, 6, 96, dtype=WIDE)
    assert relative_error(rope.rotate(rope.rotate(x, positions), positions, inverse=True), x) < 1e-9


def test_outputs_do_not_notice_an_offset_unless_matrices_fail_to_commute(method):
    rope = make(method)
    inputs, positions = vectors(rope), torch.randn(6, 2, dtype=WIDE)
    before = attended(rope, *inputs, positions)
    change = relative_error(attended(rope, *inputs, positions + 3.7), before)
    assert change > 1e-2 if method == "liere" else change < 1e-11


def test_turned_and_not_turned_back_they_would_notice():
    rope = make("comrope-torus")
    q, k, v = vectors(rope, groups=1)
    positions = torch.randn(6, 2, dtype=WIDE)

    def half_way(positions):
        a, b = rope(q, k, positions)
        return (a @ b.mT).softmax(-1) @ rope.rotate(v, positions)

    assert relative_error(half_way(positions + 3.7), half_way(positions)) > 0.1


def test_low_precision_comes_out_as_it_went_in(method):
    rope = make(method, dtype=torch.float32, block_size=8)
    x = torch.randn(2, 2, 6, 96).bfloat16()
    positions = 50 * torch.rand(6, 2)
    got = rope.rotate(x, positions, inverse=True)
    wide = rope.rotate(x.float(), positions, inverse=True)
    assert torch.equal(got, wide.bfloat16())  # rounded once


@pytest.mark.parametrize("order", ["interleaved", "half"])
@pytest.mark.parametrize("block_size", [2, 8])
def test_the_kernels_agree(method, block_size, order):
    """Interpreted, in float32: values, and all gradients."""
    rope = make(
        method, block_size=block_size, head_dim=16, dtype=torch.float32, channel_order=order
    )
    inputs = [x.detach().float().requires_grad_() for x in vectors(rope)]
    positions = torch.randn(6, 2, requires_grad=True)
    rope.backend = "triton"
    if (method, order) == ("liere", "half"):
        with pytest.raises(ValueError, match="kernels support channel_order 'half'"):
            rope.rotate(inputs[0], positions, inverse=True)
        return
    got = with_gradients(rope, inputs, positions)
    rope.backend = "reference" if method == "liere" else "spectral"
    for name, value in with_gradients(rope, inputs, positions).items():
        assert relative_error(got[name], value) < 1e-4, name


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


@pytest.mark.parametrize("order", ["interleaved", "half"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_a_projection_may_take_the_basis(method, block_size, backend, order):
    """In place of every token: its values, and all gradients."""
    rope = make(
        method, block_size=block_size, head_dim=48, backend=backend, channel_order=order,
        num_prefix_tokens=1,
    )  # fmt: skip
    x, weight = torch.randn(2, 4, 6, 48, dtype=WIDE), torch.randn(7, 4 * 48, dtype=WIDE)
    positions = torch.randn(6, 2, dtype=WIDE)
    inputs = [each.requires_grad_() for each in (x, weight, positions)]

    def with_gradients(turned, weight):
        out = turned.transpose(1, 2).flatten(2) @ weight.mT
        wanted = [*inputs, *rope.parameters()]
        return out, *torch.autograd.grad(out.tanh().square().sum(), wanted)

    expected = with_gradients(rope.rotate(x, positions, inverse=True), weight)
    turned, instead = rope._inverse_with_projection(x, positions, weight)
    for a, b in zip(with_gradients(turned, instead), expected, strict=True):
        assert relative_error(a, b) < 1e-11
    has_basis = method in ("comrope-ap", "comrope-ld", "comrope-torus") and block_size > 2
    assert (instead is not weight) == (has_basis and backend == "auto")


def test_a_projection_in_low_precision_is_rounded_once():
    rope = make("comrope-torus", dtype=torch.float32, block_size=8)
    x, weight = torch.randn(2, 2, 6, 96).bfloat16(), torch.randn(5, 192).bfloat16()
    positions = torch.rand(6, 2)
    turned, instead = rope._inverse_with_projection(x, positions, weight)
    wide = rope._inverse_with_projection(x.float(), positions, weight.float())
    assert torch.equal(turned, wide[0].bfloat16())
    assert torch.equal(instead, wide[1].bfloat16())


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
