"""Multiply the channels of every token by the basis of its block, with an analytic gradient.

Shapes: B batch, H key heads, G queries per key head, T tokens, D channels per head, m blocks per
head, b block size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comrope._dtypes import in_function_transform, is_compiling_for_cpu, no_autocast

__all__ = ["change_basis", "small_product", "sum_outer"]

COLUMNS = 16  # of one product: a few zeros are faster than many products of small matrices


def change_basis(x: Tensor, basis: Tensor) -> Tensor:
    """Return Q^T x for every token: x (B, H, G, T, D), Q (H, m, b, b)."""
    return _ChangeBasis.apply(x, basis)


def small_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for small matrices (..., b, b), never in TF32."""
    if a.device.type == "cpu":
        with no_autocast(a.device):
            return a @ b
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


class _ChangeBasis(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, basis: Tensor) -> Any:
        return (_product_op if is_compiling_for_cpu(x) else _product)(x, basis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, basis = ctx.saved_tensors
        grad_x = grad_basis = None
        if ctx.needs_input_grad[0]:
            grad_x = change_basis(grad, basis.mT)
        if ctx.needs_input_grad[1]:
            grad_basis = sum_outer(x, grad, basis.shape[-1])
        return grad_x, grad_basis


def _product(x: Tensor, basis: Tensor) -> Tensor:
    heads, blocks, size, _ = basis.shape
    with no_autocast(x.device):
        if x.device.type != "cpu":
            wide = torch.einsum("bhgtmi,hmij->bhgtmj", x.unflatten(-1, (blocks, size)), basis)
            return wide.flatten(-2)
        columns = _columns(size, x.shape[-1])
        each = columns // size
        if each > 1:
            eye = torch.eye(each, dtype=basis.dtype)
            basis = basis.unflatten(1, (-1, each))[:, :, :, :, None] * eye[:, None, :, None]
            basis = basis.reshape(heads, -1, columns, columns)
        parts = x.flatten(2, 3).split(columns, dim=-1)
        if in_function_transform():  # which knows no copy into a part
            return torch.cat([part @ basis[:, i] for i, part in enumerate(parts)], -1).view(x.shape)
        product = torch.empty_like(x, memory_format=torch.contiguous_format)
        for i, out in enumerate(product.flatten(2, 3).split(columns, dim=-1)):
            out.copy_(parts[i] @ basis[:, i])
        return product


def _columns(size: int, dim: int) -> int:
    """Return the columns of one product, a multiple of the size of a block."""
    return COLUMNS if COLUMNS % size == 0 and dim % COLUMNS == 0 else size


def sum_outer(a: Tensor, b: Tensor, size: int) -> Tensor:
    """Return sum_t a_t b_t^T of every block: (B, H, G, T, D) twice to (H, m, b, b).

    First within samples, then over them: one product of 8 x 25,000 x 8 uses little of a GPU.
    """
    return (_sum_outer_op if is_compiling_for_cpu(a) else _sum_outer)(a, b, size)


def _sum_outer(a: Tensor, b: Tensor, size: int) -> Tensor:
    columns = _columns(size, a.shape[-1])
    if all(t.stride(0) == t.shape[3] * t.stride(3) for t in (a, b)):
        # Views of one projection (B, T, H, D): the tokens of all samples are one sequence.
        a, b = (t.movedim(0, 2).flatten(2, 3)[None] for t in (a, b))
    first, second = (t.flatten(2, 3).split(columns, -1) for t in (a, b))
    with no_autocast(a.device):
        sums = [(left.mT @ right).sum(0) for left, right in zip(first, second, strict=True)]
    each = columns // size
    wide = torch.stack(sums, dim=1)  # (H, D / columns, columns, columns)
    if each == 1:
        return wide
    squares = wide.unflatten(3, (each, size)).unflatten(2, (each, size))
    return squares.diagonal(dim1=2, dim2=4).movedim(-1, 2).flatten(1, 2).contiguous()


# Opaque in a compiled graph: Inductor would merge their small products with what follows, slowly.
_product_op = torch.library.custom_op("comrope::change_basis", _product, mutates_args=())
_product_op.register_fake(lambda x, basis: x.new_empty(x.shape))
_sum_outer_op = torch.library.custom_op("comrope::sum_outer", _sum_outer, mutates_args=())
_sum_outer_op.register_fake(
    lambda a, b, size: a.new_empty(a.shape[1], a.shape[-1] // size, size, size)
)
