"""Layouts of queries, keys, values and positions.

Shapes: B batch, H key heads, G queries per key head, T tokens, m blocks per head, b block size,
N axes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "at_every_token",
    "halves_to_neighbours",
    "neighbours_to_halves",
    "to_blocks",
    "unpack",
]


def unpack(qkv: Tensor, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, heads, T, D) of q, k and v in one tensor (B, T, H (G + 2), D)."""
    parts = [qkv.shape[2] - 2 * key_heads, key_heads, key_heads]
    q, k, v = (x.transpose(1, 2) for x in qkv.split(parts, dim=2))
    return q, k, v


def at_every_token(positions: Tensor, tokens: int, prefix: int) -> Tensor:
    """Set the positions of ``prefix`` tokens to zero, where R(0) = I; add them if missing.

    Args:
        positions: (..., T', N), T' all tokens or those after the prefix.
        tokens: All of them.
        prefix: Leading tokens that are left unrotated.
    """
    if not prefix:
        return positions
    own = positions[..., positions.shape[-2] - (tokens - prefix) :, :]
    return pad(own, (0, 0, prefix, 0))


def to_blocks(x: Tensor, heads: int, block_size: int) -> Tensor:
    """(B, H G, T, D) to (B, H, G, T, m, b)."""
    return x.unflatten(-1, (-1, block_size)).unflatten(1, (heads, -1))


def halves_to_neighbours(x: Tensor) -> Tensor:
    """Channels (c, c + D/2) to (2c, 2c + 1)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def neighbours_to_halves(x: Tensor) -> Tensor:
    """Channels (2c, 2c + 1) to (c, c + D/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
