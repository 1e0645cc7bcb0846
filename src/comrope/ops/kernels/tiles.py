"""What the rotation kernels are made of: cosines, and tiles of channel pairs in registers.

A tile is ROWS rows (sample x token) by PAIRS planes of one head. The planes of a block are padded
to a power of two, PADDED of them for a block of SIZE channels, so a tile holds PAIRS // PADDED
whole blocks; padding has frequency zero and is neither read nor written. FULL says that there is
none, HALVES that channels c and c + D / 2 form a plane instead of neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = [
    "add_outer",
    "block_diagonal",
    "coordinate",
    "cos_sin",
    "frequency",
    "join_pairs",
    "load_pairs",
    "load_tile",
    "phases",
    "place_of",
    "product",
    "row_offsets",
    "split_pairs",
    "store_pairs",
    "store_tile",
]


@triton.jit
def cos_sin(angle, FAST: tl.constexpr = False):
    """Both from one reduction by quarter turns to [-pi/4, pi/4]; polynomials from Cephes.

    Good to a rounding of float32 up to some thousand radians, because the parts of pi/2 have few
    bits and their products are exact. Further out more is lost, but always far less than the
    rounding of a float32 angle of that size is worth. FAST, of whole turns and by the units for it:
    good to 1e-6, on a GPU.
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
def place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE: tl.constexpr):
    """Which row of the positions belongs to each row, and whether it turns: prefix tokens do not.

    Positions may leave out the prefix tokens.
    """
    sample = row // tokens
    token = row - sample * tokens
    place = token - (tokens - position_rows)
    if PER_SAMPLE:
        place += sample * position_rows
    return place, live & (token >= prefix)


@triton.jit
def row_offsets(row, tokens, head, strides, FLAT: tl.constexpr):
    """Where each row of a head begins; strides of sample, head and token.

    ``FLAT``: samples follow each other as tokens do, so that no row need be taken apart.
    """
    if FLAT:
        offset = row.to(tl.int64) * strides[2]
    else:
        sample = row // tokens
        token = (row - sample * tokens).to(tl.int64)
        offset = sample.to(tl.int64) * strides[0] + token * strides[2]
    return offset + head.to(tl.int64) * strides[1]


@triton.jit
def coordinate(positions, place, turned, axis, AXES: tl.constexpr):
    return tl.load(positions + place * AXES + axis, mask=turned, other=0.0)


@triton.jit
def frequency(
    frequencies, axis, head, first_block, heads, blocks,
    PLANES: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The frequencies of a tile's planes along one axis, from (N, H, m, PLANES).

    Once a row (ROWS, PAIRS), though rows are alike: a load of that shape is laid out over threads
    as the loads of channels are, and what comes of it need not move between threads.
    """
    pair = tl.arange(0, PAIRS)
    begin = ((axis * heads + head) * blocks + first_block) * PLANES
    if PLANES == PADDED:
        at = begin + pair
    else:
        at = begin + pair // PADDED * PLANES + pair % PADDED
    real = (pair % PADDED < PLANES) & (first_block + pair // PADDED < blocks)
    every = tl.zeros((ROWS, 1), dtype=tl.int32)
    return tl.load(
        frequencies + (every + at[None, :]), mask=(every == 0) & real[None, :], other=0.0
    )


@triton.jit
def phases(
    positions, frequencies, place, turned, head, first_block, heads, blocks,
    AXES: tl.constexpr, PLANES: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """sum_i w_i x_i for every row and plane (ROWS, PAIRS)."""
    angle = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    for axis in tl.static_range(AXES):
        x = coordinate(positions, place, turned, axis, AXES)
        w = frequency(
            frequencies, axis, head, first_block, heads, blocks, PLANES, PADDED, PAIRS, ROWS
        )  # fmt: skip
        angle += x[:, None] * w
    return angle


@triton.jit
def split_pairs(both, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Neighbouring channels (ROWS, 2 PAIRS) apart."""
    return tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))


@triton.jit
def join_pairs(first, second, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Neighbouring channels (ROWS, 2 PAIRS) again."""
    return tl.reshape(tl.join(first, second), (ROWS, 2 * PAIRS))


@triton.jit
def _addresses(
    x, offset, live, first_block, blocks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Where the columns of a tile lie in its rows, and which of them are no padding."""
    column = tl.arange(0, COLUMNS)
    if FULL:  # a plain range, so that the compiler sees neighbours
        at = x + offset[:, None] + (first_block * SIZE + column)[None, :]
        mask = live[:, None]
    else:
        block = first_block + column // PADDED
        inside = column % PADDED
        at = x + offset[:, None] + (block * SIZE + inside)[None, :]
        mask = live[:, None] & ((inside < SIZE) & (block < blocks))[None, :]
    return at, mask


@triton.jit
def load_pairs(
    x, offset, live, first_block, blocks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    FULL: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """The two channels of every plane, (ROWS, PAIRS) each."""
    if HALVES:
        at, mask = _addresses(
            x, offset, live, first_block, blocks, SIZE // 2, PADDED, PAIRS, FULL
        )  # fmt: skip
        first = tl.load(at, mask=mask, other=0.0)
        second = tl.load(at + blocks * SIZE // 2, mask=mask, other=0.0)
    else:
        at, mask = _addresses(
            x, offset, live, first_block, blocks, SIZE, 2 * PADDED, 2 * PAIRS, FULL
        )  # fmt: skip
        first, second = split_pairs(tl.load(at, mask=mask, other=0.0), ROWS, PAIRS)
    return first, second


@triton.jit
def store_pairs(
    x, offset, live, first_block, blocks, first, second,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    FULL: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """What ``load_pairs`` reads, written."""
    first = first.to(x.dtype.element_ty)
    second = second.to(x.dtype.element_ty)
    if HALVES:
        at, mask = _addresses(
            x, offset, live, first_block, blocks, SIZE // 2, PADDED, PAIRS, FULL
        )  # fmt: skip
        tl.store(at, first, mask=mask)
        tl.store(at + blocks * SIZE // 2, second, mask=mask)
    else:
        at, mask = _addresses(
            x, offset, live, first_block, blocks, SIZE, 2 * PADDED, 2 * PAIRS, FULL
        )  # fmt: skip
        tl.store(at, join_pairs(first, second, ROWS, PAIRS), mask=mask)


@triton.jit
def load_tile(
    x, offset, live, first_block, blocks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A tile as it lies, (ROWS, 2 PAIRS), to be copied."""
    at, mask = _addresses(x, offset, live, first_block, blocks, SIZE, 2 * PADDED, 2 * PAIRS, FULL)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_tile(
    x, offset, live, first_block, blocks, tile,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    at, mask = _addresses(x, offset, live, first_block, blocks, SIZE, 2 * PADDED, 2 * PAIRS, FULL)
    tl.store(at, tile, mask=mask)


@triton.jit
def block_diagonal(
    basis, head, first_block, blocks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Q of a tile's blocks as one matrix (2 PAIRS, 2 PAIRS), zero between blocks."""
    channel = tl.arange(0, 2 * PAIRS)
    block = channel // (2 * PADDED)
    inside = channel % (2 * PADDED)
    real = (inside < SIZE) & (first_block + block < blocks)
    begin = ((head * blocks + first_block + block) * SIZE) * SIZE
    if TRANSPOSED:
        at = begin[:, None] + inside[:, None] + inside[None, :] * SIZE
    else:
        at = begin[:, None] + inside[:, None] * SIZE + inside[None, :]
    mask = (block[:, None] == block[None, :]) & real[:, None] & real[None, :]
    return tl.load(basis + at, mask=mask, other=0.0)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b, in float32 or with operands in TF32: rounded first, hardware would cut bits off."""
    if PRECISION == "ieee":
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(_rounded(a), _rounded(b), input_precision="tf32")


@triton.jit
def add_outer(
    sums, a, b,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sums (PARTS x COLUMNS // SIDE, SIDE, SIDE) + a^T b for SIDE neighbouring columns, part by
    part of the rows: so no warp works on the rows of another, and few products between blocks are
    made for nothing. Of bfloat16 inputs with operands in bfloat16, as in any matmul; of float16
    ones in three parts, since the differences of sums must be good to what its ten bits show.
    """
    a = _grouped(a, ROWS, COLUMNS, SIDE, PARTS)
    b = _grouped(b, ROWS, COLUMNS, SIDE, PARTS)
    if PRECISION == "bf16":
        return tl.dot(tl.permute(a.to(tl.bfloat16), (0, 2, 1)), b.to(tl.bfloat16), sums)
    elif PRECISION == "tf32":
        return tl.dot(tl.permute(a, (0, 2, 1)), b, sums, input_precision="tf32x3")
    else:
        return tl.dot(tl.permute(a, (0, 2, 1)), b, sums, input_precision="ieee")


@triton.jit
def _grouped(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr):
    """(ROWS, COLUMNS) to (PARTS x COLUMNS // SIDE, ROWS // PARTS, SIDE)."""
    x = tl.reshape(x, (PARTS, ROWS // PARTS, COLUMNS // SIDE, SIDE))
    x = tl.permute(x, (0, 2, 1, 3))
    return tl.reshape(x, (PARTS * (COLUMNS // SIDE), ROWS // PARTS, SIDE))


@triton.jit
def _rounded(x):
    """To the ten bits that TF32 keeps. NaN stays: its bits would overflow into a zero."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)
