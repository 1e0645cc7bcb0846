"""Multiply the basis of a rotation into the weights before and after it: the only folding.

Scores of R(x) q and R(y) k, with R(x) = Q diag(Rot(w x)) Q^T, are those of Rot(w x) Q^T q and
Rot(w y) Q^T k. So Q^T can be multiplied into the projections of q and k once, and not into every
token; with rotated values also into that of v, and Q into the projection after attention.

Differentiable. Shapes: H key heads, G queries per key head, D channels per head, m blocks per head,
b block size, C channels on the other side of a projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope._dtypes import compute_dtype, no_autocast
from comrope.ops.basis import change_basis
from comrope.ops.layout import halves_to_neighbours, neighbours_to_halves

__all__ = ["change_channels", "fold_into_inputs", "fold_into_outputs"]


def change_channels(x: Tensor, basis: Tensor, channel_order: str) -> Tensor:
    """Return Q^T x for x (B, H G, T, D) and Q (H, m, b, b), in the channel order of x."""
    halves = channel_order == "half"
    channels = (halves_to_neighbours(x) if halves else x).unflatten(1, (basis.shape[0], -1))
    x = change_basis(channels, basis.to(x.dtype)).flatten(1, 2)
    return neighbours_to_halves(x) if halves else x


def fold_into_outputs(
    parameter: Tensor,
    basis: Tensor,
    channel_order: str,
    rows: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Return Q^T W, for a projection whose outputs are rotated.

    Args:
        parameter: A weight (outputs, C) or a bias (outputs,).
        basis: Q (H, m, b, b).
        channel_order: ``"interleaved"`` or ``"half"``.
        rows: Indices (H G, D) of the outputs that are rotated, head by head; the others are
            unchanged. By default all outputs (parts H D): the H heads of queries, then those of
            keys, and so on.
        exact: Compute in float64, so that the result is rounded once.
    """
    heads, blocks, size, _ = basis.shape
    matrix = parameter if parameter.ndim == 2 else parameter[:, None]
    if rows is None:
        channels = matrix.unflatten(0, (-1, heads, blocks * size))  # (parts, H, D, C)
    else:
        channels = matrix[rows].unflatten(0, (heads, -1)).transpose(0, 1)  # (G, H, D, C)
    dtype = torch.float64 if exact else compute_dtype(parameter, basis)
    if channel_order == "half":
        channels = halves_to_neighbours(channels.mT).mT
    with no_autocast(parameter.device):
        channels = basis.mT.to(dtype) @ channels.to(dtype).unflatten(2, (blocks, size))
    channels = channels.flatten(2, 3).to(parameter.dtype)
    if channel_order == "half":
        channels = neighbours_to_halves(channels.mT).mT
    if rows is None:
        return channels.reshape(parameter.shape)
    folded = channels.transpose(0, 1).flatten(0, 1)
    return parameter.index_put((rows,), folded if parameter.ndim == 2 else folded[..., 0])


def fold_into_inputs(
    weight: Tensor, basis: Tensor, channel_order: str, heads: int, *, exact: bool = False
) -> Tensor:
    """Return W Q, for a projection whose inputs need the inverse rotation.

    Args:
        weight: (C, heads D), of the projection after attention.
        basis: Q (H, m, b, b).
        channel_order: ``"interleaved"`` or ``"half"``.
        heads: Heads of its inputs, a multiple of H.
        exact: Compute in float64, so that the result is rounded once.
    """
    columns = weight.unflatten(1, (heads, -1)).movedim(0, 1)[None]  # (1, heads, C, D)
    dtype = torch.float64 if exact else compute_dtype(columns, basis)
    folded = change_channels(columns.to(dtype), basis, channel_order)
    return folded[0].movedim(0, 1).flatten(1).to(weight.dtype)
