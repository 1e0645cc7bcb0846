# mypy: disable-error-code="assignment"
"""The rotation of blocks of any size: q and k in one launch, read once and written once.

A program has a few blocks of one key head, the query heads that belong to it, and a share of the
rows (sample x token). Phases phi come from positions and frequencies in registers. The change of
basis is a product with the block-diagonal matrix of the program's blocks. The last rows come first:
they were written last, and are the likeliest to be in the cache still. With phi_k = sum_i x_i w_ik
for plane k:

    forward   y = Rot(phi) Q^T x
    backward  h = Rot(-phi) g for the gradient g of y; the gradient of x is Q h

The backward pass needs only y and g: Rot(-phi) y = Q^T x, in the eigenbasis, which is called x
below. Its sums over vectors and tokens stay in registers and are stored once per program. The
programs' sums are added in a fixed order, so that gradients have the same bits every time. With s
the multiple of the matrix of collinear angles (phi_k = s w_k), and for every plane

    torque  g . J y, over the vectors of a token
    pull    |g|^2, over the vectors of a token

the sums of a block are, in this order:

    turns   sum x_i torque, axis by plane (N, f): the gradient of the frequencies
    outer   sum h x^T (b, b): the gradient of the basis Q is Q outer^T
            collinear angles: sum h x^T - g y^T
    limit   collinear angles: sum s (h x^T + g y^T) / 2 (b, b)
    weight  collinear angles: sum pull, plane by plane
    cubes   collinear angles: sum pull |s|^3, plane by plane

ops/collinear.py says what the last four are for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    product,
    program_of,
    row_offsets,
    split_pairs,
    store_pairs,
    store_tile,
    tile_of,
)

__all__ = ["rotate_backward_kernel", "rotate_kernel"]


@triton.jit
def rotate_kernel(tensors, angles, strides, work, META: tl.constexpr):
    """Write y = Rot(phi) Q^T x for q and k. Values, where given, are copied."""
    program = program_of(work, META.PAIRS // META.PADDED)
    if META.HAS_BASIS:
        matrix = block_diagonal(angles.basis, program, work, False, META)
    else:
        matrix = 0.0
    x, out = tensors.x, tensors.out
    tiles = tl.cdiv(work.rows, META.ROWS)
    for step in range(program.share, tiles, work.shares):
        row = (tiles - 1 - step) * META.ROWS + tl.arange(0, META.ROWS)
        tile = tile_of(program.head, program.block, row, row < work.rows, work, META)
        phi = phases(angles.positions, angles.frequencies, tile, work, META.SIZE // 2, META)
        phi = cos_sin(phi)
        # All loads come before the first store: stores may go anywhere, so that no compiler moves
        # a load past one.
        at = row_offsets(row, tile.head, strides.x.k, work, META)
        key = load_pairs(x.k, at, tile, work, META)
        if META.HAS_V:
            at = row_offsets(row, tile.head, strides.x.v, work, META)
            value = load_tile(x.v, at, tile, work, META)
        for member in range(META.GROUP):
            head = tile.head * META.GROUP + member
            at = row_offsets(row, head, strides.x.q, work, META)
            query = _rotate(load_pairs(x.q, at, tile, work, META), phi, matrix, META)
            at = row_offsets(row, head, strides.out.q, work, META)
            store_pairs(out.q, at, query, tile, work, META)
        key = _rotate(key, phi, matrix, META)
        at = row_offsets(row, tile.head, strides.out.k, work, META)
        store_pairs(out.k, at, key, tile, work, META)
        if META.HAS_V:
            at = row_offsets(row, tile.head, strides.out.v, work, META)
            store_tile(out.v, at, value, tile, work, META)


@triton.jit
def _rotate(pair, phi, matrix, META: tl.constexpr):
    """Return Rot(phi) Q^T x for x = pair and phi = (cos, sin)."""
    first, second = pair[0].to(tl.float32), pair[1].to(tl.float32)
    cos, sin = phi
    if META.HAS_BASIS:
        joined = join_pairs(first, second, META)
        first, second = split_pairs(product(joined, matrix, META.PRECISION), META)
    return first * cos - second * sin, first * sin + second * cos


class _Sums(NamedTuple):
    """Sums that grow with every vector."""

    torque: Any  # (ROWS, PAIRS)
    pull: Any  # (ROWS, PAIRS)
    outer: Any  # (PARTS x groups, SIDE, SIDE)
    limit: Any  # (PARTS x groups, SIDE, SIDE)


@triton.jit
def rotate_backward_kernel(tensors, angles, sums, strides, work, META: tl.constexpr):
    """Write the gradients before the rotation, and the sums over tokens.

    ``sums.angles`` is (shares, H, m, sums of a block), ``sums.positions`` (H chunks, rows, N).
    ``angles.direction`` (N, H, m, PADDED) repeats that of a block for every plane.
    """
    program = program_of(work, META.PAIRS // META.PADDED)
    GROUPS: tl.constexpr = META.PARTS * (2 * META.PAIRS // META.SIDE)
    outer = tl.zeros((GROUPS, META.SIDE, META.SIDE), dtype=tl.float32)
    limit = tl.zeros((GROUPS, META.SIDE, META.SIDE), dtype=tl.float32)
    weight = tl.zeros((META.ROWS, META.PAIRS), dtype=tl.float32)
    cubes = tl.zeros((META.ROWS, META.PAIRS), dtype=tl.float32)
    turns = ()
    for _ in tl.static_range(META.AXES):
        turns = turns + (tl.zeros((META.ROWS, META.PAIRS), dtype=tl.float32),)
    if META.HAS_BASIS:
        matrix = block_diagonal(angles.basis, program, work, True, META)
    else:
        matrix = 0.0
    x, grads, out = tensors.x, tensors.grads, tensors.out
    tiles = tl.cdiv(work.rows, META.ROWS)
    for step in range(program.share, tiles, work.shares):
        row = (tiles - 1 - step) * META.ROWS + tl.arange(0, META.ROWS)
        tile = tile_of(program.head, program.block, row, row < work.rows, work, META)
        phi = phases(angles.positions, angles.frequencies, tile, work, META.SIZE // 2, META)
        cos, sin = cos_sin(phi)
        if META.IS_COLLINEAR:
            scale = phases(angles.positions, angles.direction, tile, work, META.PADDED, META)
        else:
            scale = phi
        rotation = (cos, sin, scale)
        at = row_offsets(row, tile.head, strides.x.k, work, META)
        key = load_pairs(x.k, at, tile, work, META)
        at = row_offsets(row, tile.head, strides.grads.k, work, META)
        key_grad = load_pairs(grads.k, at, tile, work, META)
        if META.HAS_V:
            at = row_offsets(row, tile.head, strides.grads.v, work, META)
            value = load_tile(grads.v, at, tile, work, META)
        torque = tl.zeros((META.ROWS, META.PAIRS), dtype=tl.float32)
        pull = tl.zeros((META.ROWS, META.PAIRS), dtype=tl.float32)
        grown = _Sums(torque, pull, outer, limit)
        for member in range(META.GROUP):
            head = tile.head * META.GROUP + member
            at = row_offsets(row, head, strides.x.q, work, META)
            query = load_pairs(x.q, at, tile, work, META)
            at = row_offsets(row, head, strides.grads.q, work, META)
            query_grad = load_pairs(grads.q, at, tile, work, META)
            query_grad, grown = _rotate_back(query, query_grad, rotation, matrix, grown, META)
            at = row_offsets(row, head, strides.out.q, work, META)
            store_pairs(out.q, at, query_grad, tile, work, META)
        key_grad, grown = _rotate_back(key, key_grad, rotation, matrix, grown, META)
        at = row_offsets(row, tile.head, strides.out.k, work, META)
        store_pairs(out.k, at, key_grad, tile, work, META)
        if META.HAS_V:
            at = row_offsets(row, tile.head, strides.out.v, work, META)
            store_tile(out.v, at, value, tile, work, META)
        torque, pull, outer, limit = grown
        if META.IS_COLLINEAR and META.WANTS_ANGLES:
            weight += pull
            cubes += pull * tl.abs(scale * scale * scale)
        if META.WANTS_ANGLES:
            added = ()
            for axis in tl.static_range(META.AXES):
                place = coordinate(angles.positions, axis, tile, META)
                added = added + (turns[axis] + torque * place[:, None],)
            turns = added
        if META.WANTS_POSITIONS:
            _store_positions(
                sums.positions, torque, angles.frequencies, program.unit, tile, work, META
            )
    if META.WANTS_ANGLES:
        each = META.AXES * (META.SIZE // 2)
        if META.HAS_BASIS:
            each += META.SIZE * META.SIZE
        if META.IS_COLLINEAR:
            each += META.SIZE * META.SIZE + 2 * META.PADDED
        at = sums.angles
        at += ((program.share * work.heads + program.head) * work.blocks + program.block) * each
        for axis in tl.static_range(META.AXES):
            to = at + META.SIZE // 2 * axis
            _store_planes(to, turns[axis], each, META.SIZE // 2, program, work, META)
        at += META.AXES * (META.SIZE // 2)
        if META.HAS_BASIS:
            _store_blocks(at, outer, each, program, work, META)
        if META.IS_COLLINEAR:
            at += META.SIZE * META.SIZE
            _store_blocks(at, limit, each, program, work, META)
            at += META.SIZE * META.SIZE
            _store_planes(at, weight, each, META.PADDED, program, work, META)
            _store_planes(at + META.PADDED, cubes, each, META.PADDED, program, work, META)


@triton.jit
def _rotate_back(y, g, rotation, matrix, sums, META: tl.constexpr):
    """Return Q h for a rotated vector y and its gradient g, and the sums with them added.

    ``rotation`` is (cos phi, sin phi, s).
    """
    cos, sin, scale = rotation
    torque, pull, outer, limit = sums
    y1, y2 = y[0].to(tl.float32), y[1].to(tl.float32)
    g1, g2 = g[0].to(tl.float32), g[1].to(tl.float32)
    h1 = g1 * cos + g2 * sin
    h2 = g2 * cos - g1 * sin
    torque += y1 * g2 - y2 * g1
    if META.HAS_BASIS:
        h = join_pairs(h1, h2, META)
        if META.WANTS_ANGLES:
            x = join_pairs(y1 * cos + y2 * sin, y2 * cos - y1 * sin, META)
            outer = add_outer(outer, h, x, META)
            if META.IS_COLLINEAR:
                joined = join_pairs(y1, y2, META)
                outer = add_outer(outer, join_pairs(-g1, -g2, META), joined, META)
                half = 0.5 * scale
                limit = add_outer(limit, join_pairs(half * g1, half * g2, META), joined, META)
                limit = add_outer(limit, join_pairs(half * h1, half * h2, META), x, META)
                pull += g1 * g1 + g2 * g2
        h1, h2 = split_pairs(product(h, matrix, META.PRECISION), META)
    return (h1, h2), _Sums(torque, pull, outer, limit)


@triton.jit
def _store_positions(sums, torque, frequencies, unit, tile, work, META: tl.constexpr):
    """Store sum_k w_ik torque_k, the gradient of the position of every row, along every axis."""
    for axis in tl.static_range(META.AXES):
        w = frequency(frequencies, axis, tile, work, META.SIZE // 2, META)
        slope = tl.where(tile.rotates, tl.sum(torque * w, axis=1), 0.0)
        at = sums + (unit.to(tl.int64) * work.rows + tile.row) * META.AXES + axis
        # Once a row, by the threads of its first plane: all threads have the sum.
        once = tile.live[:, None] & (tl.arange(0, META.PAIRS) == 0)[None, :]
        everywhere = tl.zeros((META.ROWS, META.PAIRS), dtype=tl.int32)
        tl.store(at[:, None] + everywhere, slope[:, None] + everywhere, mask=once)


@triton.jit
def _store_planes(at, values, each, PLANES: tl.constexpr, program, work, META: tl.constexpr):
    """Store the sums over rows of (ROWS, PAIRS), the planes of a block together."""
    pair = tl.arange(0, META.PAIRS)
    plane = pair % META.PADDED
    real = (plane < PLANES) & (program.block + pair // META.PADDED < work.blocks)
    tl.store(at + pair // META.PADDED * each + plane, tl.sum(values, axis=0), mask=real)


@triton.jit
def _store_blocks(at, values, each, program, work, META: tl.constexpr):
    """Store the blocks on the diagonals of (PARTS x groups, SIDE, SIDE), parts added, row-major."""
    SIDE: tl.constexpr = META.SIDE
    COUNT: tl.constexpr = 2 * META.PAIRS // SIDE * SIDE * SIDE
    values = tl.sum(tl.reshape(values, (META.PARTS, COUNT)), axis=0)
    index = tl.arange(0, COUNT)
    row = index // SIDE
    column = row // SIDE * SIDE + index % SIDE
    block = row // (2 * META.PADDED)
    i = row % (2 * META.PADDED)
    j = column % (2 * META.PADDED)
    same = (block == column // (2 * META.PADDED)) & (program.block + block < work.blocks)
    to = at + block * each + i * META.SIZE + j
    tl.store(to, values, mask=same & (i < META.SIZE) & (j < META.SIZE))
