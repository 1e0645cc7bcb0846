"""Helpers of the rotation kernels: addresses, phases, and tiles of channel pairs in registers.

A program has one key head, a few of its blocks and a share of the rows (sample x token). It works
tile by tile: ROWS rows of its blocks. In general_blocks.py, a tile has ROWS x PAIRS planes. The
planes of a block are padded to a power of two, PADDED for a block of SIZE channels, so that a tile
holds PAIRS // PADDED blocks. Padding has frequency zero and is neither read nor written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = [
    "Program",
    "Tile",
    "add_outer",
    "block_diagonal",
    "coordinate",
    "cos_sin",
    "frequency",
    "join_pairs",
    "load_pairs",
    "load_tile",
    "phases",
    "product",
    "program_of",
    "row_offsets",
    "split_pairs",
    "store_pairs",
    "store_tile",
    "tile_of",
]


class Program(NamedTuple):
    """What a program works on."""

    unit: Any  # its head and blocks, as one number
    head: Any  # its key head
    block: Any  # its first block
    share: Any  # its share of the rows


class Tile(NamedTuple):
    """What a program works on at a time."""

    head: Any  # the key head
    block: Any  # the first block; small_blocks.py: the block of every item
    row: Any  # sample x token
    live: Any  # whether the row, and the block of an item, exist
    position_row: Any  # the row of the positions that belongs to each row
    rotates: Any  # whether the row is rotated: rows of prefix tokens are not


@triton.jit
def program_of(work, BLOCKS: tl.constexpr):
    """Return what this program works on, for BLOCKS blocks a program."""
    chunks = tl.cdiv(work.blocks, BLOCKS)
    unit = tl.program_id(0) % (work.heads * chunks)
    head = unit // chunks
    block = unit % chunks * BLOCKS
    return Program(unit, head, block, tl.program_id(0) // (work.heads * chunks))


@triton.jit
def tile_of(head, block, row, live, work, META: tl.constexpr):
    """Return the tile of these rows. Positions may leave out the prefix tokens."""
    sample = row // work.tokens
    token = row - sample * work.tokens
    position_row = token - (work.tokens - work.position_rows)
    if META.PER_SAMPLE:
        position_row += sample * work.position_rows
    return Tile(head, block, row, live, position_row, live & (token >= work.prefix))


@triton.jit
def row_offsets(row, head, strides, work, META: tl.constexpr):
    """Return where each row of a head begins. Strides: sample, head, token."""
    if META.FLAT:
        offset = row.to(tl.int64) * strides[2]
    else:
        sample = row // work.tokens
        token = (row - sample * work.tokens).to(tl.int64)
        offset = sample.to(tl.int64) * strides[0] + token * strides[2]
    return offset + head.to(tl.int64) * strides[1]


@triton.jit
def cos_sin(angle, FAST: tl.constexpr = False):
    """Return both, from one reduction by quarter turns to [-pi/4, pi/4]; polynomials from Cephes.

    Exact to a rounding of float32 up to some thousand radians, because the parts of pi/2 have few
    bits and their products are exact. Beyond, the error grows, but stays far below the rounding of
    a float32 angle of that size. FAST reduces by whole turns and uses the hardware's functions:
    right to 1e-6, on a GPU only.
    """
    if FAST:
        return _fast_cos_sin(angle)
    else:
        return _exact_cos_sin(angle)


@triton.jit
def _fast_cos_sin(angle):
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    rest = angle - turns * 6.28125
    rest = rest - turns * 1.93500518798828125e-3
    rest = rest - turns * 3.0199e-7
    return libdevice.fast_cosf(rest), libdevice.fast_sinf(rest)


@triton.jit
def _exact_cos_sin(angle):
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = angle - quarters * 1.5703125
    rest = rest - quarters * 4.837512969970703125e-4
    rest = rest - quarters * 7.54978995489188216e-8
    square = rest * rest
    sine = 8.3321608736e-3 - square * 1.9515295891e-4
    sine = rest + rest * square * (square * sine - 1.6666654611e-1)
    cosine = square * 2.443315711809948e-5 - 1.388731625493765e-3
    cosine = 1.0 - 0.5 * square + square * square * (square * cosine + 4.166664568298827e-2)
    turn = quarters.to(tl.int32)
    odd = (turn & 1) != 0
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    return tl.where(((turn + 1) & 2) != 0, -cos, cos), tl.where((turn & 2) != 0, -sin, sin)


@triton.jit
def coordinate(positions, axis, tile, META: tl.constexpr):
    """Return the position of every row along one axis; 0 for prefix tokens."""
    return tl.load(positions + tile.position_row * META.AXES + axis, mask=tile.rotates, other=0.0)


@triton.jit
def frequency(frequencies, axis, tile, work, PLANES: tl.constexpr, META: tl.constexpr):
    """Return the frequencies of a tile's planes along one axis, from (N, H, m, PLANES).

    The result is (ROWS, PAIRS), though its rows are equal: a load of that shape is distributed over
    threads as the loads of channels are, so that nothing moves between threads.
    """
    pair = tl.arange(0, META.PAIRS)
    begin = ((axis * work.heads + tile.head) * work.blocks + tile.block) * PLANES
    if PLANES == META.PADDED:
        at = begin + pair
    else:
        at = begin + pair // META.PADDED * PLANES + pair % META.PADDED
    real = (pair % META.PADDED < PLANES) & (tile.block + pair // META.PADDED < work.blocks)
    every = tl.zeros((META.ROWS, 1), dtype=tl.int32)
    return tl.load(
        frequencies + (every + at[None, :]), mask=(every == 0) & real[None, :], other=0.0
    )


@triton.jit
def phases(positions, frequencies, tile, work, PLANES: tl.constexpr, META: tl.constexpr):
    """Return sum_i x_i w_i for every row and plane, (ROWS, PAIRS)."""
    angle = tl.zeros((META.ROWS, META.PAIRS), dtype=tl.float32)
    for axis in tl.static_range(META.AXES):
        x = coordinate(positions, axis, tile, META)
        w = frequency(frequencies, axis, tile, work, PLANES, META)
        angle += x[:, None] * w
    return angle


@triton.jit
def split_pairs(both, META: tl.constexpr):
    """Split neighbouring channels (ROWS, 2 PAIRS)."""
    return tl.split(tl.reshape(both, (META.ROWS, META.PAIRS, 2)))


@triton.jit
def join_pairs(first, second, META: tl.constexpr):
    """Join them to (ROWS, 2 PAIRS) again."""
    return tl.reshape(tl.join(first, second), (META.ROWS, 2 * META.PAIRS))


@triton.jit
def _addresses(x, offset, tile, work, HALVES: tl.constexpr, META: tl.constexpr):
    """Return where the columns of a tile are, and which of them are no padding.

    HALVES: the columns are the first channels of all planes, else all channels.
    """
    SIZE: tl.constexpr = META.SIZE // 2 if HALVES else META.SIZE
    PADDED: tl.constexpr = META.PADDED if HALVES else 2 * META.PADDED
    COLUMNS: tl.constexpr = META.PAIRS if HALVES else 2 * META.PAIRS
    column = tl.arange(0, COLUMNS)
    if META.FULL:  # a plain range, so that the compiler sees neighbours
        at = x + offset[:, None] + (tile.block * SIZE + column)[None, :]
        mask = tile.live[:, None]
    else:
        block = tile.block + column // PADDED
        inside = column % PADDED
        at = x + offset[:, None] + (block * SIZE + inside)[None, :]
        mask = tile.live[:, None] & ((inside < SIZE) & (block < work.blocks))[None, :]
    return at, mask


@triton.jit
def load_pairs(x, offset, tile, work, META: tl.constexpr):
    """Load the two channels of every plane, (ROWS, PAIRS) each."""
    at, mask = _addresses(x, offset, tile, work, META.HALVES, META)
    if META.HALVES:
        first = tl.load(at, mask=mask, other=0.0)
        second = tl.load(at + work.blocks * META.SIZE // 2, mask=mask, other=0.0)
    else:
        first, second = split_pairs(tl.load(at, mask=mask, other=0.0), META)
    return first, second


@triton.jit
def store_pairs(x, offset, pair, tile, work, META: tl.constexpr):
    """Store two channels of every plane where ``load_pairs`` would read them."""
    first = pair[0].to(x.dtype.element_ty)
    second = pair[1].to(x.dtype.element_ty)
    at, mask = _addresses(x, offset, tile, work, META.HALVES, META)
    if META.HALVES:
        tl.store(at, first, mask=mask)
        tl.store(at + work.blocks * META.SIZE // 2, second, mask=mask)
    else:
        tl.store(at, join_pairs(first, second, META), mask=mask)


@triton.jit
def load_tile(x, offset, tile, work, META: tl.constexpr):
    """Load all channels of a tile (ROWS, 2 PAIRS), to be copied."""
    at, mask = _addresses(x, offset, tile, work, False, META)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_tile(x, offset, values, tile, work, META: tl.constexpr):
    """Store what ``load_tile`` loads."""
    at, mask = _addresses(x, offset, tile, work, False, META)
    tl.store(at, values, mask=mask)


@triton.jit
def block_diagonal(basis, program, work, TRANSPOSED: tl.constexpr, META: tl.constexpr):
    """Load Q of a program's blocks as one matrix (2 PAIRS, 2 PAIRS), zero between blocks."""
    channel = tl.arange(0, 2 * META.PAIRS)
    block = channel // (2 * META.PADDED)
    inside = channel % (2 * META.PADDED)
    real = (inside < META.SIZE) & (program.block + block < work.blocks)
    begin = (program.head * work.blocks + program.block + block) * META.SIZE * META.SIZE
    if TRANSPOSED:
        at = begin[:, None] + inside[:, None] + inside[None, :] * META.SIZE
    else:
        at = begin[:, None] + inside[:, None] * META.SIZE + inside[None, :]
    mask = (block[:, None] == block[None, :]) & real[:, None] & real[None, :]
    return tl.load(basis + at, mask=mask, other=0.0)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return a @ b in float32 or with TF32 operands, rounded first: hardware truncates."""
    if PRECISION == "ieee":
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(_rounded(a), _rounded(b), input_precision="tf32")


@triton.jit
def add_outer(sums, a, b, META: tl.constexpr):
    """Return sums (PARTS x groups, SIDE, SIDE) + a^T b for groups of SIDE neighbouring columns.

    The rows are summed up in PARTS parts, so that no warp needs the rows of another, and few
    products between blocks are computed in vain. Operands are in bfloat16 for bfloat16 inputs, as
    in any matmul. For float16 inputs they are split in three, since differences of the sums must be
    right to the ten bits of float16.
    """
    a, b = _grouped(a, META), _grouped(b, META)
    if META.PRECISION == "bf16":
        return tl.dot(tl.permute(a.to(tl.bfloat16), (0, 2, 1)), b.to(tl.bfloat16), sums)
    elif META.PRECISION == "tf32":
        return tl.dot(tl.permute(a, (0, 2, 1)), b, sums, input_precision="tf32x3")
    else:
        return tl.dot(tl.permute(a, (0, 2, 1)), b, sums, input_precision="ieee")


@triton.jit
def _grouped(x, META: tl.constexpr):
    """Return (ROWS, 2 PAIRS) as (PARTS x groups, ROWS // PARTS, SIDE)."""
    GROUPS: tl.constexpr = 2 * META.PAIRS // META.SIDE
    x = tl.reshape(x, (META.PARTS, META.ROWS // META.PARTS, GROUPS, META.SIDE))
    x = tl.permute(x, (0, 2, 1, 3))
    return tl.reshape(x, (META.PARTS * GROUPS, META.ROWS // META.PARTS, META.SIDE))


@triton.jit
def _rounded(x):
    """Round to the ten bits of TF32. NaN is kept: its bits would overflow into a zero."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)
