"""Arguments of the rotation kernels, as named tuples.

Triton passes a named tuple to a kernel as its fields in order, and reads fields by name inside. A
field that is None is left out. Shapes as in launch.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["AngleArgs", "Heads", "Meta", "Sums", "Tensors", "Work", "compile_time"]


class Heads(NamedTuple):
    """Queries (B, H G, T, D), keys (B, H, T, D) and, optionally, values (B, H, T, D).

    Any strides are allowed, except that the channels of a token are contiguous. In a kernel the
    fields are pointers, or the strides of sample, head and token.
    """

    q: Any
    k: Any
    v: Any = None


class Tensors(NamedTuple):
    """The tensors of one launch. A second instance holds their strides."""

    x: Heads  # to be rotated; in the backward pass, the rotated q and k
    grads: Heads | None  # backward: the gradients of the rotated tensors
    out: Heads  # forward: the rotated tensors; backward: the gradients before the rotation


class AngleArgs(NamedTuple):
    """The angles of the rotation, float32 and contiguous."""

    positions: Any  # (T', N) or (B, T', N), T' is T, or T without the prefix tokens
    frequencies: Any  # (N, H, m, f)
    basis: Any  # (H, m, b, b)
    direction: Any = None  # backward, collinear angles: (N, H, m)


class Sums(NamedTuple):
    """What the backward kernels sum up."""

    angles: Any  # (shares, H, m, each): over the tokens of a share
    positions: Any  # (parts, B T, N): over the planes of a part of the heads


class Work(NamedTuple):
    """The sizes of a launch that are known at run time."""

    rows: Any  # B T
    tokens: Any  # T
    prefix: Any  # leading tokens that are left unrotated
    position_rows: Any  # T'
    heads: Any  # H
    blocks: Any  # m
    shares: Any  # into how many parts the rows are divided


class Meta(NamedTuple):
    """The values of a launch that are known at compile time."""

    # The rotation
    GROUP: int  # G
    AXES: int  # N
    SIZE: int  # b
    HALVES: bool  # channels c and c + D / 2 form a plane, not neighbours
    PER_SAMPLE: bool  # every sample has positions of its own
    FLAT: bool  # in memory, samples follow each other as tokens do
    HAS_V: bool  # values are copied too
    ROWS: int  # rows of a tile
    # Blocks of any size: general_blocks.py
    HAS_BASIS: bool = True
    PADDED: int = 0  # planes of a block, padded to a power of two
    PAIRS: int = 0  # planes of a tile, padding included
    FULL: bool = False  # there is no padding
    PRECISION: str = ""  # of matrix products
    # Blocks of size 4 and 8: small_blocks.py
    BLOCKS: int = 0  # blocks of a tile
    FAST: bool = False  # use the hardware's sine and cosine
    STAGES: int = 0  # tiles that are loaded ahead
    # The backward pass
    IS_COLLINEAR: bool = False
    WANTS_ANGLES: bool = False
    WANTS_POSITIONS: bool = False
    EACH: int = 0  # small blocks: sums of a block, padded to a power of two
    SIDE: int = 0  # general blocks: side of the matrices that are summed up
    PARTS: int = 0  # general blocks: into how many parts the rows of a tile are divided for it


def compile_time(meta: Any) -> Any:
    """Return a named tuple with its fields as constants, as a kernel's parameter ``META``.

    Triton 3.6 requires that every field is a ``constexpr``, not only the tuple. The interpreter
    computes with plain values.
    """
    if triton.knobs.runtime.interpret:
        return meta
    return type(meta)(*map(tl.constexpr, meta))
