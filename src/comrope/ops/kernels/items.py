# mypy: disable-error-code="assignment, misc, var-annotated"
"""What the kernels of small blocks are made of: a block of a row in the registers of one thread.

An item is a block of a row (sample x token). Its channels are a tuple of vectors over the items of
a program, and so are the entries of its basis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from comrope.ops.kernels.matrices import join_columns, split_columns
from comrope.ops.kernels.tiles import coordinate, cos_sin, row_offsets

__all__ = [
    "channels",
    "load_basis",
    "load_frequencies",
    "load_item",
    "parts",
    "rotated",
    "rotated_back",
    "store_item",
    "times",
    "turns_of",
    "work_of",
]


@triton.jit
def work_of(heads, blocks, BLOCKS: tl.constexpr):
    """The head of this program, its first block, and which share of the rows it has."""
    chunks = tl.cdiv(blocks, BLOCKS)
    unit = tl.program_id(0) % (heads * chunks)
    return unit // chunks, unit % chunks * BLOCKS, tl.program_id(0) // (heads * chunks)


@triton.jit
def load_basis(basis, head, block, blocks, SIZE: tl.constexpr):
    """The entries of the basis of every item, row by row."""
    at = (head * blocks + block)[:, None] * (SIZE * SIZE) + tl.arange(0, SIZE * SIZE)[None, :]
    return split_columns(
        tl.load(basis + at, mask=(block < blocks)[:, None], other=0.0), SIZE * SIZE
    )


@triton.jit
def load_frequencies(
    frequencies, head, block, heads, blocks, AXES: tl.constexpr, PLANES: tl.constexpr
):  # fmt: skip
    """Of every axis and plane, from (N, H, m, PLANES)."""
    values = ()
    for axis in tl.static_range(AXES):
        at = ((axis * heads + head) * blocks + block) * PLANES
        for plane in tl.static_range(PLANES):
            values = values + (tl.load(frequencies + at + plane, mask=block < blocks, other=0.0),)
    return values


@triton.jit
def turns_of(
    positions, place, turned, w,
    AXES: tl.constexpr, PLANES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The cosines and sines of every plane."""
    x = ()
    for axis in tl.static_range(AXES):
        x = x + (coordinate(positions, place, turned, axis, AXES),)
    cosines = ()
    sines = ()
    for plane in tl.static_range(PLANES):
        angle = x[0] * w[plane]
        for axis in tl.static_range(1, AXES):
            angle = tl.fma(x[axis], w[axis * PLANES + plane], angle)
        cos, sin = cos_sin(angle, FAST)
        cosines = cosines + (cos,)
        sines = sines + (sin,)
    return cosines, sines


@triton.jit
def channels(
    x, row, tokens, head, strides, block,
    SIZE: tl.constexpr, HALVES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Where the channels of each item lie, (M, SIZE), or (M, SIZE / 2) of its first half."""
    WIDTH: tl.constexpr = SIZE // 2 if HALVES else SIZE
    offset = row_offsets(row, tokens, head, strides, FLAT) + block * WIDTH
    return x + offset[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_item(at, live, blocks, SIZE: tl.constexpr, HALVES: tl.constexpr):
    """One tile, or two where the channels of a plane lie half a head apart."""
    tile = (tl.load(at, mask=live[:, None], other=0.0),)
    if HALVES:
        tile = tile + (tl.load(at + blocks * (SIZE // 2), mask=live[:, None], other=0.0),)
    return tile


@triton.jit
def parts(tile, SIZE: tl.constexpr, HALVES: tl.constexpr):
    """The channels of each item in float32, those of a plane after each other."""
    if HALVES:
        first = split_columns(tile[0].to(tl.float32), SIZE // 2)
        second = split_columns(tile[1].to(tl.float32), SIZE // 2)
        values = ()
        for plane in tl.static_range(SIZE // 2):
            values = values + (first[plane], second[plane])
    else:
        values = split_columns(tile[0].to(tl.float32), SIZE)
    return values


@triton.jit
def store_item(at, x, live, blocks, SIZE: tl.constexpr, HALVES: tl.constexpr):
    """What ``load_item`` and ``parts`` read, written."""
    if HALVES:
        first, second = (), ()
        for plane in tl.static_range(SIZE // 2):
            first = first + (x[2 * plane],)
            second = second + (x[2 * plane + 1],)
        _store_tile(at, join_columns(first, SIZE // 2), live)
        _store_tile(at + blocks * (SIZE // 2), join_columns(second, SIZE // 2), live)
    else:
        _store_tile(at, join_columns(x, SIZE), live)


@triton.jit
def _store_tile(at, tile, live):
    tl.store(at, tile.to(at.dtype.element_ty), mask=live[:, None])


@triton.jit
def times(x, matrix, SIZE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Q x, or Q^T x."""
    values = ()
    for i in tl.static_range(SIZE):
        value = x[0] * matrix[i if TRANSPOSED else i * SIZE]
        for j in tl.static_range(1, SIZE):
            value = tl.fma(x[j], matrix[j * SIZE + i if TRANSPOSED else i * SIZE + j], value)
        values = values + (value,)
    return values


@triton.jit
def rotated(x, cos, sin, SIZE: tl.constexpr):
    values = ()
    for plane in tl.static_range(SIZE // 2):
        first, second = x[2 * plane], x[2 * plane + 1]
        values = values + (
            first * cos[plane] - second * sin[plane],
            first * sin[plane] + second * cos[plane],
        )
    return values


@triton.jit
def rotated_back(x, cos, sin, SIZE: tl.constexpr):
    opposite = ()
    for plane in tl.static_range(SIZE // 2):
        opposite = opposite + (-sin[plane],)
    return rotated(x, cos, opposite, SIZE)
