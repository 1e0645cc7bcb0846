"""The paper's Algorithm 1: one matrix exponential per position, head and block.

Slow and simple: the specification that every other backend is tested against, and on a CPU the
only backend for angle matrices that do not commute.

Shapes: B batch, H key heads, G queries per key head, T tokens, m blocks per head, b block size,
N axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope.ops.spectral import sum_over_axes

__all__ = ["rotate_reference", "rotation_matrices"]


def rotation_matrices(matrices: Tensor, positions: Tensor) -> Tensor:
    """Return R(x) = exp(sum_i x_i A_i).

    Args:
        matrices: A (N, H, m, b, b).
        positions: x (..., T, N).

    Returns:
        R (..., T, H, m, b, b).
    """
    exponents = sum_over_axes(positions[..., None, None, None, None, :], matrices)
    # One batch of matrices, because matrix_exp cannot view every layout that a compiler may choose.
    # In parts if there are millions, because its backward overflows 32-bit indices on a GPU.
    flat = exponents.flatten(0, -3)
    most = 2**26 // flat.shape[-1] ** 2
    if flat.shape[0] <= most:
        return torch.matrix_exp(flat).reshape(exponents.shape)
    parts = [torch.matrix_exp(part) for part in flat.split(most)]
    return torch.cat(parts).reshape(exponents.shape)


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
