"""The paper's Algorithm 1: one matrix exponential per position, head and block.

Slow and simple: the specification that every other backend is tested against, and on a CPU the
only backend for angle matrices that do not commute.

Shapes: B batch, H key heads, G queries per key head, T tokens, m blocks per head, b block size,
N axes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from comrope.ops.spectral import sum_over_axes

__all__ = ["rotate_reference", "rotation_matrices"]

# Largest entries of exponents. matrix_exp squares the exponential of a small matrix repeatedly.
# Every squaring doubles the deviation from an orthogonal matrix, which ends at about the exponent
# times the precision of the dtype: 1e-4 at these limits.
LARGEST = {torch.float32: 128.0, torch.float64: 1e11}


def rotation_matrices(matrices: Tensor, positions: Tensor) -> Tensor:
    """Return R(x) = exp(sum_i x_i A_i).

    Args:
        matrices: A (N, H, m, b, b), float32 or float64.
        positions: x (..., T, N).

    Returns:
        R (..., T, H, m, b, b).

    Raises:
        ValueError: Positions are so far from the origin that a float64 matrix exponential would not
            be orthogonal.
    """
    exponents = sum_over_axes(positions[..., None, None, None, None, :], matrices)
    # A graph cannot depend on values, so the operator does. It has first derivatives only.
    return _exponential_op(exponents) if torch.compiler.is_compiling() else _exponential(exponents)


def _exponential(exponents: Tensor) -> Tensor:
    """Return exp of skew-symmetric matrices (..., b, b)."""
    return _matrix_exp(_widened(exponents)).to(exponents.dtype)


def _widened(exponents: Tensor) -> Tensor:
    """Return exponents in a dtype in which their exponentials are orthogonal.

    Exponents that are too large for float64, or not finite, become NaN where no error can be
    raised: under vmap, and beside infinite ones, which come from a run that diverged.
    """
    most = LARGEST[torch.float64]
    try:
        largest = exponents.detach().max().item()  # of a skew matrix, the largest magnitude
    except RuntimeError:  # without entries, or without values as under vmap
        largest = math.nan
    if largest <= LARGEST[exponents.dtype]:
        return exponents
    if most < largest < math.inf:
        raise ValueError(
            f"positions: expected them nearer to the origin: sum_i x_i A_i has an entry of "
            f"{largest:.0e}, and its exponential is exact up to {most:.0e}"
        )
    return torch.where(exponents.abs() <= most, exponents, torch.nan).double()


def _matrix_exp(matrices: Tensor) -> Tensor:
    """Return exp of matrices (..., b, b)."""
    # One batch of matrices, because matrix_exp cannot view every layout that a compiler may choose.
    # In parts if there are millions, because its backward overflows 32-bit indices on a GPU.
    flat = matrices.flatten(0, -3)
    most = 2**26 // flat.shape[-1] ** 2
    if flat.shape[0] <= most:
        return torch.matrix_exp(flat).reshape(matrices.shape)
    parts = [torch.matrix_exp(part) for part in flat.split(most)]
    return torch.cat(parts).reshape(matrices.shape)


@torch.library.custom_op("comrope::exponential", mutates_args=())
def _exponential_op(exponents: Tensor) -> Tensor:
    """Compute ``_exponential`` in a compiled graph, opaquely."""
    return _exponential(exponents)


@torch.library.custom_op("comrope::exponential_backward", mutates_args=())
def _exponential_backward_op(exponents: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of exponents E for the gradient G of their exponentials.

    exp([[E^T, G], [0, E^T]]) has it in its upper right corner.
    """
    size = exponents.shape[-1]
    transposed = _widened(exponents).mT
    upper = torch.cat((transposed, grad.to(transposed.dtype)), dim=-1)
    lower = torch.cat((torch.zeros_like(transposed), transposed), dim=-1)
    whole = _matrix_exp(torch.cat((upper, lower), dim=-2))
    return whole[..., :size, size:].to(exponents.dtype).contiguous()


_exponential_op.register_fake(lambda exponents: exponents.new_empty(exponents.shape))
_exponential_backward_op.register_fake(lambda exponents, _: exponents.new_empty(exponents.shape))
_exponential_op.register_autograd(
    lambda ctx, grad: _exponential_backward_op(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def rotate_reference(
    q: Tensor, k: Tensor, positions: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """Return R(x) q and R(x) k.

    Args:
        q: Blocks (B, H, G, T, m, b).
        k: Blocks (B, H, 1, T, m, b).
        positions: x (..., T, N).
        matrices: A (N, H, m, b, b).
    """
    rotations = rotation_matrices(matrices, positions)
    # Shared positions: one matrix for the batch, without a copy per sample.
    each = "thmij" if rotations.ndim == 5 else "bthmij"
    q, k = q.to(rotations.dtype), k.to(rotations.dtype)
    q = torch.einsum(f"{each},bhgtmj->bhgtmi", rotations, q)
    return q, torch.einsum(f"{each},bhgtmj->bhgtmi", rotations, k)
