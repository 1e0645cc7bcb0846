"""The spectral rotation against the paper's Algorithm 1, in values and in all gradients."""

from __future__ import annotations

import pytest
import torch
from helpers import make, queries_and_keys, relative_error, scores_and_gradients, set_frequencies

from comrope.analysis import scores
from comrope.ops import collinear

SIZES = [(b, n) for b in (2, 3, 4, 8, 16) for n in (1, 2, 3, 4)]
FROM_MATRICES = ("comrope-ap", "comrope-ld")


def assert_parity(rope, positions=None, scores_within: float = 1e-12) -> None:
    if positions is None:
        positions = torch.randn(6, rope.num_axes, dtype=torch.float64)
    q, k = queries_and_keys(rope)
    positions.requires_grad_()
    expected = scores_and_gradients(rope, q, k, positions, "reference")
    got = scores_and_gradients(rope, q, k, positions, "spectral")
    for name, value in expected.items():
        limit = scores_within if name == "scores" else 1e-9
        assert relative_error(got[name], value) <= limit, name


@pytest.mark.parametrize("init", ["normal", "zeros", "rope"])
@pytest.mark.parametrize(("block_size", "num_axes"), SIZES)
def test_every_size_and_start(commuting, block_size, num_axes, init):
    assert_parity(make(commuting, block_size=block_size, num_axes=num_axes, init=init))


def test_positions_per_sample(commuting):
    assert_parity(make(commuting, num_axes=3), torch.randn(2, 6, 3, dtype=torch.float64))


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1e3])
def test_positions_of_any_scale(commuting, spread):
    """Angles of a thousand turns lose digits in both paths alike."""
    positions = spread * torch.randn(6, 2, dtype=torch.float64)
    assert_parity(make(commuting, block_size=8), positions, scores_within=1e-10)


@pytest.mark.parametrize("block_size", [3, 4, 8, 16])
@pytest.mark.parametrize("name", FROM_MATRICES)
def test_repeated_frequencies(name, block_size):
    rope = make(name, block_size=block_size)
    set_frequencies(rope, torch.ones(block_size // 2))
    assert_parity(rope)


@pytest.mark.parametrize("gap", [10.0**-e for e in range(1, 17)])
@pytest.mark.parametrize("name", FROM_MATRICES)
def test_nearly_repeated_frequencies(name, gap):
    rope = make(name, block_size=8)
    set_frequencies(rope, 1.5 + gap * torch.tensor([0.0, 1.0, 2.5, -1.0], dtype=torch.float64))
    assert_parity(rope)


@pytest.mark.parametrize(("spread", "gap"), [(1e3, 1e-6), (1e4, 1e-7), (1e-4, 1e-1)])
@pytest.mark.parametrize("name", FROM_MATRICES)
def test_what_is_nearly_repeated_depends_on_how_far_positions_reach(name, spread, gap):
    rope = make(name, block_size=8)
    set_frequencies(rope, 1e-3 + gap * torch.tensor([0.0, 1.0, 2.5, 4.0], dtype=torch.float64))
    positions = spread * torch.randn(6, 2, dtype=torch.float64)
    assert_parity(rope, positions, scores_within=1e-10)


@pytest.mark.parametrize("size", [0.0, *(10.0**-e for e in range(1, 20, 3))])
@pytest.mark.parametrize("name", FROM_MATRICES)
def test_vanishing_beside_ordinary_frequencies(name, size):
    rope = make(name, block_size=8)
    set_frequencies(rope, torch.tensor([2.0, 1.0, size, size], dtype=torch.float64))
    assert_parity(rope)


def test_liere_on_one_axis_has_a_spectrum():
    assert_parity(make("liere", num_axes=1, block_size=8))


@pytest.mark.parametrize("name", ["comrope-ap", "comrope-ld", "comrope-torus", "rope-mixed"])
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
        with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
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


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("outlier", "gap"), [(1e3, 1e-4), (1e4, 1e-5), (1e6, 1e-7), (1e6, 1e-10)])
def test_a_far_token_that_takes_no_part_changes_nothing(outlier, gap, dtype, limit):
    """Padding far away, masked out of the loss, just after a start at zero."""
    rope = make("comrope-ld", num_axes=1, block_size=8)
    set_frequencies(rope, gap * torch.arange(1.0, 5.0))
    q, k = (x.detach() for x in queries_and_keys(rope))
    positions = torch.rand(6, 1, dtype=torch.float64)
    positions[0] = outlier

    def gradient(backend, dtype):
        rope.to(dtype).backend = backend
        value = scores(rope, q.to(dtype), k.to(dtype), positions.to(dtype))[..., 1:, 1:]
        return torch.autograd.grad(value.tanh().sum(), rope.method.P)[0].double()

    expected = gradient("reference", torch.float64)
    assert relative_error(gradient("spectral", dtype), expected) < limit


def test_second_derivatives_through_torch_func():
    """Both ways to a Hessian say no, rather than give a wrong one; the reference gives it."""
    rope = make("comrope-ld", num_heads=1, head_dim=4)
    q, k = (x.detach() for x in queries_and_keys(rope, tokens=2, batch=1, groups=1))
    positions = torch.rand(2, 2, dtype=torch.float64)

    def loss(matrix):
        out = torch.func.functional_call(rope, {"method.P": matrix}, (q, k, positions))
        return (out[0] @ out[1].mT).tanh().sum()

    matrix = rope.method.P.detach()
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        torch.func.jacrev(torch.func.jacrev(loss))(matrix)
    with pytest.raises(NotImplementedError, match="jvp"):  # torch's own words on forward mode
        torch.func.hessian(loss)(matrix)
    rope.backend = "reference"
    backward_twice = torch.func.jacrev(torch.func.jacrev(loss))(matrix)
    torch.testing.assert_close(torch.func.hessian(loss)(matrix), backward_twice)


def test_no_matrix_per_token_is_formed():
    """What the spectral path allocates is of the size of q, not b times it (T b b a block)."""
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


def test_scores_do_not_depend_on_the_backend_in_float32(commuting):
    rope = make(commuting, block_size=8, dtype=torch.float32)
    q, k = (x.detach().float() for x in queries_and_keys(rope))
    positions = torch.rand(6, 2)
    rope.backend = "reference"
    expected = scores(rope, q, k, positions)
    rope.backend = "spectral"
    assert relative_error(scores(rope, q, k, positions), expected) <= 1e-5


def test_sums_that_may_run_in_tf32_are_not_divided_by_small_gaps(monkeypatch):
    """As on a GPU that was allowed to: the gradient of small angles stays good to a percent."""
    rope = make("comrope-ld", block_size=8)
    set_frequencies(rope, 0.02 * torch.tensor([1.0, 1.1, 0.7, 0.2]))
    q, k = queries_and_keys(rope, tokens=50)
    positions = torch.rand(50, 2, dtype=torch.float64)
    expected = scores_and_gradients(rope, q, k, positions, "reference")["method.P"]
    outer = collinear._outer

    def in_tf32(grad, x):
        def rounded(t):
            return ((t.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

        return outer(rounded(grad.contiguous()), rounded(x.contiguous()))

    monkeypatch.setattr(collinear, "_outer", in_tf32)
    rope.float()
    single = [x.detach().float().requires_grad_() for x in (q, k)]

    def error():
        got = scores_and_gradients(rope, *single, positions.float(), "spectral")["method.P"]
        return relative_error(got.double(), expected)

    without = error()
    monkeypatch.setattr(collinear, "_noise_of_sums", lambda like: 5e-4)
    assert error() < 0.01 < without
