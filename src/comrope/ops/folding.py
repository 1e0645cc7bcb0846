"""The basis of a rotation, multiplied into the weights around it: of those there is one, of tokens
there are many.
"""

from __future__ import annotations

from torch import Tensor

from comrope._dtypes import compute_dtype, no_autocast
from comrope.ops.layout import halves_to_neighbours, neighbours_to_halves, to_blocks
from comrope.ops.spectral import change_basis

__all__ = ["basis_into_inputs", "basis_into_outputs", "change_channels"]


def change_channels(x: Tensor, basis: Tensor, channel_order: str) -> Tensor:
    """Q^T x for x (B, H G, T, D), Q (H, m, b, b), whatever planes are made of."""
    halves = channel_order == "half"
    blocks = halves_to_neighbours(x) if halves else x
    with no_autocast(x.device):
        blocks = to_blocks(blocks, basis.shape[0], basis.shape[-1])
        x = change_basis(blocks, basis.to(x.dtype)).reshape(x.shape)
    return neighbours_to_halves(x) if halves else x


def basis_into_inputs(weight: Tensor, heads: int, basis: Tensor, channel_order: str) -> Tensor:
    """W Q for a weight (C, heads D) of what comes out of attention in that basis."""
    rows = weight.unflatten(1, (heads, -1)).movedim(0, 1)[None]  # (1, heads, C, D)
    rows = change_channels(rows.to(compute_dtype(rows, basis)), basis, channel_order)
    return rows[0].movedim(0, 1).flatten(1).to(weight.dtype)


def basis_into_outputs(parameter: Tensor, parts: int, basis: Tensor, channel_order: str) -> Tensor:
    """Q^T W for a weight (parts H D, C), or a bias, of queries, keys and values to be rotated."""
    channels = parameter.unflatten(0, (parts, basis.shape[0], -1)).movedim(2, -1)  # (P, H, .., D)
    blocks = channels if parameter.ndim == 2 else channels[:, :, None]
    blocks = change_channels(blocks.to(compute_dtype(blocks, basis)), basis, channel_order)
    return blocks.view_as(channels).movedim(-1, 2).flatten(0, 2).to(parameter.dtype)
