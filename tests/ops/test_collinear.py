"""Gradients of collinear angle matrices: exact where frequencies repeat or vanish."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_parity,
    make,
    queries_and_keys,
    relative_error,
    scores_and_gradients,
    set_frequencies,
)

from comrope.analysis import scores
from comrope.ops import basis, collinear
from comrope.ops.layout import halves_to_neighbours

FROM_MATRICES = ("comrope-ap", "comrope-ld")


@pytest.mark.parametrize("name", FROM_MATRICES)
def test_repeated_frequencies(name):
    for block_size in (3, 4, 8, 16):
        rope = make(name, block_size=block_size)
        set_frequencies(rope, torch.ones(block_size // 2))
        assert_parity(rope)


@pytest.mark.parametrize("name", FROM_MATRICES)
def test_nearly_repeated_frequencies(name):
    for exponent in range(1, 17):
        rope = make(name, block_size=8)
        apart = 10.0**-exponent * torch.tensor([0.0, 1.0, 2.5, -1.0], dtype=torch.float64)
        set_frequencies(rope, 1.5 + apart)
        assert_parity(rope)


@pytest.mark.parametrize("name", FROM_MATRICES)
def test_what_is_nearly_repeated_depends_on_how_far_positions_reach(name):
    for spread, gap in ((1e3, 1e-6), (1e4, 1e-7), (1e-4, 1e-1)):
        rope = make(name, block_size=8)
        set_frequencies(rope, 1e-3 + gap * torch.tensor([0.0, 1.0, 2.5, 4.0], dtype=torch.float64))
        positions = spread * torch.randn(6, 2, dtype=torch.float64)
        assert_parity(rope, positions, scores_within=1e-10)


@pytest.mark.parametrize("name", FROM_MATRICES)
def test_vanishing_beside_ordinary_frequencies(name):
    for size in (0.0, *(10.0**-e for e in range(1, 20, 3))):
        rope = make(name, block_size=8)
        set_frequencies(rope, torch.tensor([2.0, 1.0, size, size], dtype=torch.float64))
        assert_parity(rope)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_a_far_token_without_gradient_changes_nothing(dtype, limit):
    """Padding far away, masked out of the loss, shortly after an initialization at zero."""
    for outlier, gap in ((1e3, 1e-4), (1e4, 1e-5), (1e6, 1e-7), (1e6, 1e-10)):
        rope = make("comrope-ld", num_axes=1, block_size=8)
        set_frequencies(rope, gap * torch.arange(1.0, 5.0))
        q, k = (x.detach() for x in queries_and_keys(rope))
        positions = torch.rand(6, 1, dtype=torch.float64)
        positions[0] = outlier

        def gradient(backend, dtype, rope=rope, q=q, k=k, positions=positions):
            rope.to(dtype).backend = backend
            value = scores(rope, q.to(dtype), k.to(dtype), positions.to(dtype))[..., 1:, 1:]
            return torch.autograd.grad(value.tanh().sum(), rope.method.P)[0].double()

        expected = gradient("reference", torch.float64)
        assert relative_error(gradient("spectral", dtype), expected) < limit


@pytest.mark.parametrize(
    "name",
    [
        "comrope-ld",
        "comrope-torus",
        "rope-mixed",
        pytest.param("comrope-ap", marks=pytest.mark.slow),
    ],
)
def test_gradcheck(name):
    rope = make(name, num_heads=1, head_dim=8, block_size=4)
    names, values = zip(*rope.named_parameters(), strict=True)

    def score(q, k, positions, *parameters):
        state = dict(zip(names, parameters, strict=True))
        out = torch.func.functional_call(rope, state, (q, k, positions))
        return out[0] @ out[1].mT

    q, k = queries_and_keys(rope, tokens=3, batch=1, groups=1)
    positions = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(score, (q, k, positions, *values))
    if name in FROM_MATRICES:
        with pytest.raises(RuntimeError, match="backend='reference'"):
            torch.autograd.gradgradcheck(score, (q, k, positions, *values))
        rope.backend = "reference"
    assert torch.autograd.gradgradcheck(score, (q, k, positions, *values))


def test_gradients_in_float32_at_nearly_repeated_frequencies():
    """Both sides of the switch between quotient and limit keep five digits."""
    for exponent in range(9):
        rope = make("comrope-ld", block_size=8)
        set_frequencies(rope, 1.5 + 10.0**-exponent * torch.randn(4, dtype=torch.float64))
        q, k = queries_and_keys(rope, tokens=40)
        positions = torch.randn(40, 2, dtype=torch.float64)
        expected = scores_and_gradients(rope, q, k, positions, "reference")
        rope.float()
        narrow = [x.detach().float().requires_grad_() for x in (q, k)]
        got = scores_and_gradients(rope, *narrow, positions.float(), "spectral")
        for name, value in expected.items():
            assert relative_error(got[name].double(), value) <= 1e-4, (name, exponent)


def test_second_derivatives_through_torch_func():
    """Both ways to a Hessian raise instead of returning a wrong one; the reference returns it."""
    rope = make("comrope-ld", num_heads=1, head_dim=4)
    q, k = (x.detach() for x in queries_and_keys(rope, tokens=2, batch=1, groups=1))
    positions = torch.rand(2, 2, dtype=torch.float64)

    def loss(matrix):
        out = torch.func.functional_call(rope, {"method.P": matrix}, (q, k, positions))
        return (out[0] @ out[1].mT).tanh().sum()

    matrix = rope.method.P.detach()
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.func.jacrev(torch.func.jacrev(loss))(matrix)
    with pytest.raises(NotImplementedError, match="jvp"):  # from torch, for forward mode
        torch.func.hessian(loss)(matrix)
    rope.backend = "reference"
    backward_twice = torch.func.jacrev(torch.func.jacrev(loss))(matrix)
    torch.testing.assert_close(torch.func.hessian(loss)(matrix), backward_twice)


def test_no_matrix_per_token_is_formed():
    """The spectral backend allocates tensors of the size of q, not b times it (T b b per block)."""
    tokens = 64
    rope = make("comrope-ld", num_heads=1, head_dim=16, block_size=16)
    q, k = (torch.randn(1, 1, tokens, 16, dtype=torch.float64).requires_grad_() for _ in "qk")
    positions = torch.rand(tokens, 2, dtype=torch.float64)
    largest = {}
    for backend in ("spectral", "reference"):
        with _LargestTensor() as recorder:
            scores_and_gradients(rope, q, k, positions, backend)
        largest[backend] = recorder.largest
    score_size = tokens * tokens
    assert largest["spectral"] <= score_size
    assert largest["reference"] > score_size  # the recorder would see such a matrix


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_sums_that_may_run_in_tf32_are_not_divided_by_small_gaps(monkeypatch):
    """As on a GPU that was allowed to: the gradient of small angles stays good to a percent."""
    rope = make("comrope-ld", block_size=8)
    set_frequencies(rope, 0.02 * torch.tensor([1.0, 1.1, 0.7, 0.2]))
    q, k = queries_and_keys(rope, tokens=50)
    positions = torch.rand(50, 2, dtype=torch.float64)
    expected = scores_and_gradients(rope, q, k, positions, "reference")["method.P"]
    outer = basis.sum_outer

    def in_tf32(grad, x, size):
        def rounded(t):
            return ((t.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

        return outer(rounded(grad.contiguous()), rounded(x.contiguous()), size)

    for module in (basis, collinear):
        monkeypatch.setattr(module, "sum_outer", in_tf32)
    rope.float()
    single = [x.detach().float().requires_grad_() for x in (q, k)]

    def error():
        got = scores_and_gradients(rope, *single, positions.float(), "spectral")["method.P"]
        return relative_error(got.double(), expected)

    without = error()
    monkeypatch.setattr(collinear, "_precision_of_sums", lambda like: 5e-4)
    assert error() < 0.01 < without


@pytest.mark.parametrize("order", ["interleaved", "half"])
@pytest.mark.parametrize("name", FROM_MATRICES)
def test_a_loss_of_the_rotated_vectors_themselves(name, order):
    """Gradients are those of Q^T R(x) q with a constant Q, also where no score is formed."""
    for frequencies in ([2.9, 1.7, 0.4, 0.1], [1.5, 1.5, 0.3, 0.3 + 1e-6], [0.0, 0.0, 0.0, 0.0]):
        rope = make(name, block_size=8, channel_order=order)
        set_frequencies(rope, torch.tensor(frequencies))
        q, k = queries_and_keys(rope)
        positions = torch.randn(6, 2, dtype=torch.float64)
        rope.backend = "spectral"
        got = torch.autograd.grad(rope(q, k, positions)[0].sin().sum(), [q, *rope.parameters()])
        rope.backend, rope.channel_order = "reference", "interleaved"
        x = halves_to_neighbours(q) if order == "half" else q
        rotated = rope.rotate(x, positions).unflatten(1, (2, -1)).unflatten(-1, (-1, 8))
        constant = rope.spectrum()[0].detach()
        own = torch.einsum("bhgtmi,hmij->bhgtmj", rotated, constant)
        expected = torch.autograd.grad(own.sin().sum(), [q, *rope.parameters()])
        for a, b in zip(got, expected, strict=True):
            assert relative_error(a, b) < 1e-9
