"""The change of basis and the sums over tokens, against one product per block."""

from __future__ import annotations

import pytest
import torch
from helpers import relative_error

from comrope.ops import basis

SIZES = [(8, 64), (8, 24), (4, 20), (3, 9), (16, 32), (32, 64)]  # of a block, and D


def layouts(dim):
    """Queries with groups, contiguous and as views of one projection (B, T, heads, D)."""
    yield torch.randn(2, 3, 2, 5, dim, dtype=torch.float64)
    yield (
        torch.randn(2, 5, 9, dim, dtype=torch.float64)[:, :, :3]
        .transpose(1, 2)
        .unflatten(1, (3, 1))
    )
    yield (
        torch.randn(2, 5, 9, dim, dtype=torch.float64)[:, :, :6]
        .transpose(1, 2)
        .unflatten(1, (3, 2))
    )


@pytest.mark.parametrize(("size", "dim"), SIZES)
def test_products_and_gradients(size, dim):
    for x in layouts(dim):
        q = torch.randn(3, dim // size, size, size, dtype=torch.float64, requires_grad=True)
        x.requires_grad_()

        def by_block(x, q, size=size):
            return torch.einsum("bhgtmi,hmij->bhgtmj", x.unflatten(-1, (-1, size)), q).flatten(-2)

        got, expected = basis.change_basis(x, q), by_block(x, q)
        assert relative_error(got, expected) < 1e-13
        grad = torch.randn_like(got)
        for a, b in zip(
            torch.autograd.grad(got, (x, q), grad), torch.autograd.grad(expected, (x, q), grad),
            strict=True,
        ):  # fmt: skip
            assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize(("size", "dim"), SIZES)
def test_sums_over_tokens(size, dim):
    for a in layouts(dim):
        b = torch.randn_like(a)
        expected = torch.einsum(
            "bhgtmi,bhgtmj->hmij", a.unflatten(-1, (-1, size)), b.unflatten(-1, (-1, size))
        )
        assert relative_error(basis.sum_outer(a, b, size), expected) < 1e-13


@pytest.mark.parametrize(("size", "dim"), [(8, 24), (8, 32)])
def test_the_operators_of_compiled_graphs(size, dim):
    """Their results have the strides of their fake results."""
    x = torch.randn(2, 5, 9, dim)[:, :, :3].transpose(1, 2).unflatten(1, (3, 1))
    q = torch.randn(3, dim // size, size, size)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(basis._product_op, (x, q), test_utils=utils)
    torch.library.opcheck(basis._sum_outer_op, (x, torch.randn_like(x), size), test_utils=utils)
