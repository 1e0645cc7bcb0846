"""The rotation of planes, in every layout, against 2 x 2 matrices."""

from __future__ import annotations

import pytest
import torch
from helpers import relative_error

from comrope.ops import planes

LAYOUTS = [(12, 6, False), (12, 6, True), (9, 3, False), (15, 6, False)]  # D, planes, half


def by_definition(x, phase, half):
    """Multiply every plane by its matrix."""
    result = x.clone()
    blocks = x.shape[-1] - 2 * phase.shape[-1]
    size = x.shape[-1] // blocks if blocks else 2
    for plane in range(phase.shape[-1]):
        first = plane // (size // 2) * size + plane % (size // 2) * 2
        pair = [plane, plane + phase.shape[-1]] if half else [first, first + 1]
        cos, sin = phase[..., plane].cos(), phase[..., plane].sin()
        matrix = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
        result[..., pair] = (matrix @ x[..., pair, None])[..., 0]
    return result


def vectors(dim, dtype=torch.float64):
    """Contiguous, with heads after tokens, at an odd offset, with an odd stride, reversed."""
    yield torch.randn(2, 3, 5, dim, dtype=dtype)
    yield torch.randn(2, 5, 3, dim, dtype=dtype).transpose(1, 2)
    yield torch.randn(2 * 3 * 5 * dim + 1, dtype=dtype)[1:].view(2, 3, 5, dim)
    yield torch.randn(2, 3, 5, dim + 1, dtype=dtype)[..., 1:]
    yield torch.randn(2, 3, dim, 5, dtype=dtype).mT


@pytest.mark.parametrize(("dim", "count", "half"), LAYOUTS)
def test_rotations_and_torques(dim, count, half):
    phase = torch.randn(3, 5, count, dtype=torch.float64)
    for x in vectors(dim):
        turned = planes.rotate_planes(x, phase.cos(), phase.sin(), half)
        assert relative_error(turned, by_definition(x, phase, half)) < 1e-14
        grad = torch.randn_like(turned)
        angle = phase.expand(2, -1, -1, -1).clone().requires_grad_()
        (expected,) = torch.autograd.grad(by_definition(x, angle, half), angle, grad)
        assert relative_error(planes.torque(turned, grad, count, half), expected) < 1e-13


def test_the_operator_of_compiled_graphs():
    phase = torch.randn(5, 4).T
    torch.library.opcheck(
        planes._cos_and_sin, (phase,), test_utils=("test_schema", "test_faketensor")
    )
    cos, sin = torch.vmap(planes._cos_and_sin, in_dims=1)(phase)
    assert torch.equal(cos, phase.T.cos())
    assert torch.equal(sin, phase.T.sin())
