"""The spectral rotation: q and k in one launch, read once and written once.

A program takes a few blocks of one key head and of the query heads that belong to it, and goes
through its share of the rows (sample x token). Phases come from positions and frequencies in
registers; the change of basis is a product with the block-diagonal matrix of the program's blocks.
The last rows come first: they were written last, and are the likeliest to be in the cache still.

The way back through the spectral rotation, with the sums that the gradients of the angles need.

It needs nothing but the rotated vectors y and their gradients g: turned back, they are the vectors
x and the gradients h before the rotation (in the eigenbasis). Work is shared out as on the way
there. The sums over tokens stay in registers and leave once per program; programs are added up in a
fixed order, so that gradients have the same bits every time. For every block, in this order:

    turns  sum x_i (g . J y), axis by plane (N, f): the gradient of the frequencies
    outer  sum h x^T (b, b): the gradient of the basis Q is Q outer^T; for a line sum h x^T - g y^T
    limit  for a line, sum s (h x^T + g y^T) / 2 (b, b), and for every plane sum |g|^2 and
           sum |g|^2 |s|^3: what these are for is said in ops/collinear.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from comrope.ops.kernels.tiles import (
    add_outer,
    block_diagonal,
    coordinate,
    cos_sin,
    frequency,
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

__all__ = ["rotate_back_kernel", "rotate_kernel"]


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


@triton.jit
def rotate_back_kernel(
    q, k, q_grad, k_grad, v_grad, q_out, k_out, v_out, positions, frequencies, basis, direction,
    sums, position_sums,
    q_strides, k_strides, q_grad_strides, k_grad_strides, v_grad_strides, q_out_strides,
    k_out_strides, v_out_strides,
    rows, tokens, prefix, position_rows, heads, blocks, shares,
    GROUP: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr, HALVES: tl.constexpr,
    FLAT: tl.constexpr, PER_SAMPLE: tl.constexpr, HAS_BASIS: tl.constexpr, HAS_V: tl.constexpr,
    IS_LINE: tl.constexpr, WANTS_SUMS: tl.constexpr, WANTS_POSITIONS: tl.constexpr,
    SIDE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients before the rotation from those after it, and the sums over tokens.

    ``sums`` is (shares, H, m, what a block has), ``position_sums`` (H chunks, rows, N);
    ``direction`` (N, H, m, PADDED) has that of its block for every plane.
    """
    chunks = tl.cdiv(blocks, PAIRS // PADDED)
    unit = tl.program_id(0) % (heads * chunks)
    share = tl.program_id(0) // (heads * chunks)
    head = unit // chunks
    block = (unit % chunks) * (PAIRS // PADDED)
    outer = tl.zeros((PARTS * (2 * PAIRS // SIDE), SIDE, SIDE), dtype=tl.float32)
    limit = tl.zeros((PARTS * (2 * PAIRS // SIDE), SIDE, SIDE), dtype=tl.float32)
    weight = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    cubes = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    turns0 = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    turns1 = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    turns2 = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    turns3 = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    if HAS_BASIS:
        matrix = block_diagonal(basis, head, block, blocks, SIZE, PADDED, PAIRS, True)
    else:
        matrix = 0.0
    tiles = tl.cdiv(rows, ROWS)
    for step in range(share, tiles, shares):
        row = (tiles - 1 - step) * ROWS + tl.arange(0, ROWS)
        live = row < rows
        place, turned = place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE)
        angle = phases(
            positions, frequencies, place, turned, head, block, heads, blocks,
            AXES, SIZE // 2, PADDED, PAIRS, ROWS,
        )  # fmt: skip
        cos, sin = cos_sin(angle)
        if IS_LINE:
            scale = phases(
                positions, direction, place, turned, head, block, heads, blocks,
                AXES, PADDED, PADDED, PAIRS, ROWS,
            )  # fmt: skip
        else:
            scale = angle
        k1, k2 = load_pairs(
            k, row_offsets(row, tokens, head, k_strides, FLAT), live, block, blocks,
            SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
        )  # fmt: skip
        g1, g2 = load_pairs(
            k_grad, row_offsets(row, tokens, head, k_grad_strides, FLAT), live, block, blocks,
            SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
        )  # fmt: skip
        if HAS_V:
            value = load_tile(
                v_grad, row_offsets(row, tokens, head, v_grad_strides, FLAT), live, block, blocks,
                SIZE, PADDED, PAIRS, FULL,
            )  # fmt: skip
        torque = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
        pull = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
        for member in range(GROUP):
            query = head * GROUP + member
            q1, q2 = load_pairs(
                q, row_offsets(row, tokens, query, q_strides, FLAT), live, block, blocks,
                SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
            )  # fmt: skip
            h1, h2 = load_pairs(
                q_grad, row_offsets(row, tokens, query, q_grad_strides, FLAT), live, block, blocks,
                SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
            )  # fmt: skip
            h1, h2, torque, pull, outer, limit = _turn_back(
                q1, q2, h1, h2, cos, sin, scale, matrix, torque, pull, outer, limit,
                PAIRS, ROWS, HAS_BASIS, IS_LINE, WANTS_SUMS, SIDE, PARTS, PRECISION,
            )  # fmt: skip
            store_pairs(
                q_out, row_offsets(row, tokens, query, q_out_strides, FLAT), live, block, blocks,
                h1, h2, SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
            )  # fmt: skip
        h1, h2, torque, pull, outer, limit = _turn_back(
            k1, k2, g1, g2, cos, sin, scale, matrix, torque, pull, outer, limit,
            PAIRS, ROWS, HAS_BASIS, IS_LINE, WANTS_SUMS, SIDE, PARTS, PRECISION,
        )  # fmt: skip
        store_pairs(
            k_out, row_offsets(row, tokens, head, k_out_strides, FLAT), live, block, blocks,
            h1, h2, SIZE, PADDED, PAIRS, ROWS, FULL, HALVES,
        )  # fmt: skip
        if HAS_V:
            store_tile(
                v_out, row_offsets(row, tokens, head, v_out_strides, FLAT), live, block, blocks,
                value, SIZE, PADDED, PAIRS, FULL,
            )  # fmt: skip
        if IS_LINE and WANTS_SUMS:
            weight += pull
            cubes += pull * tl.abs(scale * scale * scale)
        if WANTS_SUMS:
            turns0 += torque * coordinate(positions, place, turned, 0, AXES)[:, None]
            if AXES > 1:
                turns1 += torque * coordinate(positions, place, turned, 1, AXES)[:, None]
            if AXES > 2:
                turns2 += torque * coordinate(positions, place, turned, 2, AXES)[:, None]
            if AXES > 3:
                turns3 += torque * coordinate(positions, place, turned, 3, AXES)[:, None]
        if WANTS_POSITIONS:
            for axis in tl.static_range(AXES):
                w = frequency(
                    frequencies, axis, head, block, heads, blocks, SIZE // 2, PADDED, PAIRS, ROWS
                )  # fmt: skip
                slope = tl.where(turned, tl.sum(torque * w, axis=1), 0.0)
                at = position_sums + (unit.to(tl.int64) * rows + row) * AXES + axis
                # Once a row, by whoever has its first plane: all of them have its sum.
                once = live[:, None] & (tl.arange(0, PAIRS) == 0)[None, :]
                everywhere = tl.zeros((ROWS, PAIRS), dtype=tl.int32)
                tl.store(at[:, None] + everywhere, slope[:, None] + everywhere, mask=once)
    if WANTS_SUMS:
        each = AXES * (SIZE // 2)
        if HAS_BASIS:
            each += SIZE * SIZE
        if IS_LINE:
            each += SIZE * SIZE + 2 * PADDED
        at = sums + ((share * heads + head) * blocks + block) * each
        _leave_planes(at, turns0, block, blocks, each, SIZE // 2, PADDED, PAIRS)
        if AXES > 1:
            _leave_planes(at + SIZE // 2, turns1, block, blocks, each, SIZE // 2, PADDED, PAIRS)
        if AXES > 2:
            _leave_planes(at + SIZE // 2 * 2, turns2, block, blocks, each, SIZE // 2, PADDED, PAIRS)
        if AXES > 3:
            _leave_planes(at + SIZE // 2 * 3, turns3, block, blocks, each, SIZE // 2, PADDED, PAIRS)
        at += AXES * (SIZE // 2)
        if HAS_BASIS:
            _leave_blocks(at, outer, block, blocks, each, SIZE, PADDED, PAIRS, SIDE, PARTS)
        if IS_LINE:
            at += SIZE * SIZE
            _leave_blocks(at, limit, block, blocks, each, SIZE, PADDED, PAIRS, SIDE, PARTS)
            at += SIZE * SIZE
            _leave_planes(at, weight, block, blocks, each, PADDED, PADDED, PAIRS)
            _leave_planes(at + PADDED, cubes, block, blocks, each, PADDED, PADDED, PAIRS)


@triton.jit
def _turn_back(
    y1, y2, g1, g2, cos, sin, scale, matrix, torque, pull, outer, limit,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, HAS_BASIS: tl.constexpr, IS_LINE: tl.constexpr,
    WANTS_SUMS: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient before the rotation, from a rotated vector y and its gradient g; sums grow."""
    y1, y2 = y1.to(tl.float32), y2.to(tl.float32)
    g1, g2 = g1.to(tl.float32), g2.to(tl.float32)
    h1 = g1 * cos + g2 * sin
    h2 = g2 * cos - g1 * sin
    torque += y1 * g2 - y2 * g1
    if HAS_BASIS:
        h = join_pairs(h1, h2, ROWS, PAIRS)
        if WANTS_SUMS:
            x = join_pairs(y1 * cos + y2 * sin, y2 * cos - y1 * sin, ROWS, PAIRS)
            outer = add_outer(outer, h, x, ROWS, 2 * PAIRS, SIDE, PARTS, PRECISION)
            if IS_LINE:
                y = join_pairs(y1, y2, ROWS, PAIRS)
                g = join_pairs(-g1, -g2, ROWS, PAIRS)
                outer = add_outer(outer, g, y, ROWS, 2 * PAIRS, SIDE, PARTS, PRECISION)
                half = 0.5 * scale
                g = join_pairs(half * g1, half * g2, ROWS, PAIRS)
                limit = add_outer(limit, g, y, ROWS, 2 * PAIRS, SIDE, PARTS, PRECISION)
                g = join_pairs(half * h1, half * h2, ROWS, PAIRS)
                limit = add_outer(limit, g, x, ROWS, 2 * PAIRS, SIDE, PARTS, PRECISION)
                pull += g1 * g1 + g2 * g2
        h1, h2 = split_pairs(product(h, matrix, PRECISION), ROWS, PAIRS)
    return h1, h2, torque, pull, outer, limit


@triton.jit
def _leave_planes(
    at, values, first_block, blocks, each,
    PLANES: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The sums over rows of (ROWS, PAIRS), the planes of a block together."""
    pair = tl.arange(0, PAIRS)
    plane = pair % PADDED
    real = (plane < PLANES) & (first_block + pair // PADDED < blocks)
    tl.store(at + pair // PADDED * each + plane, tl.sum(values, axis=0), mask=real)


@triton.jit
def _leave_blocks(
    at, values, first_block, blocks, each,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, SIDE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The blocks on the diagonals of (PARTS x groups, SIDE, SIDE), parts added up, row by row."""
    groups: tl.constexpr = 2 * PAIRS // SIDE
    values = tl.sum(tl.reshape(values, (PARTS, groups * SIDE * SIDE)), axis=0)
    index = tl.arange(0, groups * SIDE * SIDE)
    row = index // SIDE
    column = row // SIDE * SIDE + index % SIDE
    block = row // (2 * PADDED)
    i = row % (2 * PADDED)
    j = column % (2 * PADDED)
    same = (block == column // (2 * PADDED)) & (first_block + block < blocks)
    where = at + block * each + i * SIZE + j
    tl.store(where, values, mask=same & (i < SIZE) & (j < SIZE))
