"""The spectral rotation: q and k in one launch, read once and written once.

A program takes a few blocks of one key head and of the query heads that belong to it, and goes
through its share of the rows (sample x token). Phases come from positions and frequencies in
registers; the change of basis is a product with the block-diagonal matrix of the program's blocks.
The last rows come first: they were written last, and are the likeliest to be in the cache still.
"""

from __future__ import annotations

import triton
import triton.language as tl

from comrope.ops.kernels.tiles import (
    block_diagonal,
    cos_sin,
    join_pairs,
    load_pairs,
    load_tile,
    phases,
    place_of,
    product,
    row_offsets,
    split_pairs,
    store_pairs,
    store_tile,
)

__all__ = ["rotate_kernel"]


@triton.jit
def rotate_kernel(
    q, k, v, q_out, k_out, v_out, positions, frequencies, basis,
    q_strides, k_strides, v_strides, q_out_strides, k_out_strides, v_out_strides,
    rows, tokens, prefix, position_rows, heads, blocks, shares,
    GROUP: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr, HALVES: tl.constexpr,
    FLAT: tl.constexpr, PER_SAMPLE: tl.constexpr, HAS_BASIS: tl.constexpr, HAS_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y = Rot(phi) Q^T x for q and k; v, where given, is copied. Strides: sample, head, token."""
    chunks = tl.cdiv(blocks, PAIRS // PADDED)
    unit = tl.program_id(0) % (heads * chunks)
    head = unit // chunks
    block = (unit % chunks) * (PAIRS // PADDED)
    if HAS_BASIS:
        matrix = block_diagonal(basis, head, block, blocks, SIZE, PADDED, PAIRS, False)
    else:
        matrix = 0.0
    tiles = tl.cdiv(rows, ROWS)
    for step in range(tl.program_id(0) // (heads * chunks), tiles, shares):
        row = (tiles - 1 - step) * ROWS + tl.arange(0, ROWS)
        live = row < rows
        place, turned = place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE)
        angle = phases(
            positions, frequencies, place, turned, head, block, heads, blocks,
            AXES, SIZE // 2, PADDED, PAIRS, ROWS,
        )  # fmt: skip
        cos, sin = cos_sin(angle)
        # All that can be on its way before the first number is needed; what is written may lie
        # anywhere, so no compiler moves these past a store.
        k1, k2 = load_pairs(
            k, row_offsets(row, tokens, head, k_strides, FLAT), live, block, blocks,
            SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
        )  # fmt: skip
        if HAS_V:
            value = load_tile(
                v, row_offsets(row, tokens, head, v_strides, FLAT), live, block, blocks,
                SIZE, PADDED, PAIRS, FULL,
            )  # fmt: skip
        for member in range(GROUP):
            query = head * GROUP + member
            q1, q2 = load_pairs(
                q, row_offsets(row, tokens, query, q_strides, FLAT), live, block, blocks,
                SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
            )  # fmt: skip
            q1, q2 = _turn(q1, q2, cos, sin, matrix, PAIRS, ROWS, HAS_BASIS, PRECISION)
            store_pairs(
                q_out, row_offsets(row, tokens, query, q_out_strides, FLAT), live, block, blocks,
                q1, q2, SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
            )  # fmt: skip
        k1, k2 = _turn(k1, k2, cos, sin, matrix, PAIRS, ROWS, HAS_BASIS, PRECISION)
        store_pairs(
            k_out, row_offsets(row, tokens, head, k_out_strides, FLAT), live, block, blocks,
            k1, k2, SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
        )  # fmt: skip
        if HAS_V:
            store_tile(
                v_out, row_offsets(row, tokens, head, v_out_strides, FLAT), live, block, blocks,
                value, SIZE, PADDED, PAIRS, FULL,
            )  # fmt: skip


@triton.jit
def _turn(
    first, second, cos, sin, matrix,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, HAS_BASIS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, second = first.to(tl.float32), second.to(tl.float32)
    if HAS_BASIS:
        joined = join_pairs(first, second, ROWS, PAIRS)
        first, second = split_pairs(product(joined, matrix, PRECISION), ROWS, PAIRS)
    return first * cos - second * sin, first * sin + second * cos
