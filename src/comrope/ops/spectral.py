"""The rotation in the eigenbasis: q' = diag_k(Rot(phi_k)) Q^T q with phi_k = sum_i w_ik x_i.

The final product with Q is left out: it is the same for q and k, so it cancels in their scores.
No exponential, no matrix per token, no complex numbers.

Shapes: B batch, H key heads, G queries per key head, T tokens, m blocks per head, b block size,
f = b // 2 planes per block, N axes. An odd b leaves the last coordinate unrotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope.angles import CommutingAngles

__all__ = [
    "change_basis",
    "phases",
    "rotate_commuting",
    "rotate_planes",
    "small_product",
    "sum_over_axes",
]


def sum_over_axes(x: Tensor, w: Tensor) -> Tensor:
    """Return sum_i x_i w_i for x (..., N) and w (N, ...), which broadcast.

    The axes are added one by one. A matrix product may run in TF32, which keeps only ten bits.
    """
    total = x[..., 0] * w[0]
    for axis in range(1, w.shape[0]):
        total = total + x[..., axis] * w[axis]
    return total


def phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return phi = sum_i w_i x_i.

    Args:
        positions: (T, N) or (B, T, N).
        frequencies: (N, H, m, f).

    Returns:
        (1 or B, H, 1, T, m, f).
    """
    x = positions if positions.ndim == 3 else positions[None]
    return sum_over_axes(x[:, None, None, :, None, None, :], frequencies[:, :, None, None])


def rotate_planes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of neighbours of x (..., b) by its angle, given as cos and sin (..., f)."""
    planes = cos.shape[-1]
    first, second = x[..., 0 : 2 * planes : 2], x[..., 1 : 2 * planes : 2]
    rotated = torch.stack(
        (
            torch.addcmul(first * cos, second, sin, value=-1),
            torch.addcmul(first * sin, second, cos),
        ),
        dim=-1,
    ).flatten(-2)
    return rotated if x.shape[-1] % 2 == 0 else torch.cat((rotated, x[..., -1:]), dim=-1)


def small_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for small matrices (..., b, b), elementwise: never in TF32."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def change_basis(x: Tensor, basis: Tensor) -> Tensor:
    """Return Q^T x for every token: x (B, H, G, T, m, b), Q (H, m, b, b)."""
    return torch.einsum("bhgtmi,hmij->bhgtmj", x, basis)


def rotate_commuting(
    q: Tensor, k: Tensor, positions: Tensor, angles: CommutingAngles
) -> tuple[Tensor, Tensor]:
    """Rotate blocks q (B, H, G, T, m, b) and k (B, H, 1, T, m, b) at positions (..., T, N)."""
    phase = phases(positions, angles.frequencies)
    cos, sin = phase.cos(), phase.sin()
    q, k = q.to(phase.dtype), k.to(phase.dtype)
    if angles.basis is not None:
        q, k = change_basis(q, angles.basis), change_basis(k, angles.basis)
    return rotate_planes(q, cos, sin), rotate_planes(k, cos, sin)
