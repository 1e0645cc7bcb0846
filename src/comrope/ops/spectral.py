"""The rotation in the eigenbasis: q' = diag_k(Rot(phi_k)) Q^T q with phi_k = sum_i w_ik x_i.

The multiplication back by Q is left out: it is the same for q and k, so it cancels in their scores.
No exponential, no matrix per token, no complex numbers.

Shapes: B batch, H key heads, G queries a key head, T tokens, m blocks a head, b block size,
f = b // 2 planes a block, N axes. An odd b leaves the last coordinate unrotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope.angles import Torus

__all__ = [
    "change_basis",
    "phases",
    "rotate_planes",
    "rotate_torus",
    "small_product",
    "sum_over_axes",
]


def sum_over_axes(x: Tensor, w: Tensor) -> Tensor:
    """sum_i x_i w_i for x (..., N) and w (N, ...), which broadcast.

    Axis by axis, not as a matrix product: those may run in TF32, where angles would lose all but
    ten bits.
    """
    total = x[..., 0] * w[0]
    for axis in range(1, w.shape[0]):
        total = total + x[..., axis] * w[axis]
    return total


def phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """phi = sum_i w_i x_i: x (T, N) or (B, T, N), w (N, H, m, f) to (1 or B, H, 1, T, m, f)."""
    x = positions if positions.ndim == 3 else positions[None]
    return sum_over_axes(x[:, None, None, :, None, None, :], frequencies[:, :, None, None])


def rotate_planes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of neighbours of x (..., b) by its angle, given as cos and sin (..., f)."""
    planes = cos.shape[-1]
    first, second = x[..., 0 : 2 * planes : 2], x[..., 1 : 2 * planes : 2]
    turned = torch.stack(
        (
            torch.addcmul(first * cos, second, sin, value=-1),
            torch.addcmul(first * sin, second, cos),
        ),
        dim=-1,
    ).flatten(-2)
    return turned if x.shape[-1] % 2 == 0 else torch.cat((turned, x[..., -1:]), dim=-1)


def small_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for small matrices (..., b, b), number by number: never in TF32."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def change_basis(x: Tensor, basis: Tensor) -> Tensor:
    """Q^T x for every token: x (B, H, G, T, m, b), Q (H, m, b, b)."""
    return torch.einsum("bhgtmi,hmij->bhgtmj", x, basis)


def rotate_torus(q: Tensor, k: Tensor, positions: Tensor, torus: Torus) -> tuple[Tensor, Tensor]:
    """Rotate blocks q (B, H, G, T, m, b) and k (B, H, 1, T, m, b) at positions (..., T, N)."""
    angle = phases(positions, torus.frequencies)
    cos, sin = angle.cos(), angle.sin()
    q, k = q.to(angle.dtype), k.to(angle.dtype)
    if torus.basis is not None:
        q, k = change_basis(q, torus.basis), change_basis(k, torus.basis)
    return rotate_planes(q, cos, sin), rotate_planes(k, cos, sin)
