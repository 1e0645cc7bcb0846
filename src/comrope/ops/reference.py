"""The paper's Algorithm 1: one matrix exponential per position, head and block.

Slow and obvious; it is the specification that every other path is tested against, and the only
path for angle matrices that do not commute.

Shapes: B batch, H key heads, G queries a key head, T tokens, m blocks a head, b block size, N axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope.ops.spectral import sum_over_axes

__all__ = ["rotate_reference", "rotation_matrices"]


def rotation_matrices(matrices: Tensor, positions: Tensor) -> Tensor:
    """R(x) = exp(sum_i x_i A_i): A (N, H, m, b, b), x (..., T, N) to R (..., T, H, m, b, b)."""
    exponents = sum_over_axes(positions[..., None, None, None, None, :], matrices)
    # As one batch of matrices: matrix_exp cannot view every layout that a compiler may choose.
    # In parts if they are millions: its backward overflows 32-bit indices on a GPU.
    flat = exponents.flatten(0, -3)
    most = 2**26 // flat.shape[-1] ** 2
    if flat.shape[0] <= most:
        return torch.matrix_exp(flat).reshape(exponents.shape)
    parts = [torch.matrix_exp(part) for part in flat.split(most)]
    return torch.cat(parts).reshape(exponents.shape)


def rotate_reference(
    q: Tensor, k: Tensor, positions: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """R(x) q and R(x) k for blocks q (B, H, G, T, m, b), k (B, H, 1, T, m, b), x (..., T, N)."""
    rotations = rotation_matrices(matrices, positions)
    # Shared positions: one matrix for a whole batch of vectors, never a copy of it per sample.
    each = "thmij" if rotations.ndim == 5 else "bthmij"
    q, k = q.to(rotations.dtype), k.to(rotations.dtype)
    q = torch.einsum(f"{each},bhgtmj->bhgtmi", rotations, q)
    return q, torch.einsum(f"{each},bhgtmj->bhgtmi", rotations, k)
