# mypy: disable-error-code="assignment, misc, var-annotated"
"""The way back through the rotation of blocks of four or eight channels.

As rotation_back.py, with a block in the registers of one thread (blocks.py). Of the sums over
tokens only what is skew is made: the rest of them would be the gradient of moving S out of the skew
matrices, or Q out of the orthogonal ones. With u ^ v = u v^T - v u^T, for every block in this
order:

    turns   sum x_i (g . J y), axis by plane (N, f)
    wedges  sum h ^ x, for a line less sum g ^ y; of every two planes, the four entries between them
    then    of a torus sum g . J y for every plane
            of a line sum s (h ^ x + g ^ y) as the wedges, sum |g|^2 and sum |g|^2 |s|^3
"""

from __future__ import annotations

import triton
import triton.language as tl

from comrope.ops.kernels.items import (
    channels,
    load_basis,
    load_frequencies,
    load_item,
    parts,
    rotated_back,
    store_item,
    times,
    turns_of,
    work_of,
)
from comrope.ops.kernels.matrices import join_columns
from comrope.ops.kernels.tiles import coordinate, place_of

__all__ = ["rotate_blocks_back_kernel", "sums_of_a_block"]


def sums_of_a_block(axes, size, is_line):
    """How many sums over tokens a block has."""
    wedges = size * (size - 2) // 2
    return axes * (size // 2) + wedges + (wedges + 2 if is_line else size // 2)


_sums_of_a_block = triton.constexpr_function(sums_of_a_block)


@triton.jit
def rotate_blocks_back_kernel(
    q, k, q_grad, k_grad, v_grad, q_out, k_out, v_out, positions, frequencies, basis, direction,
    sums, position_sums,
    q_strides, k_strides, q_grad_strides, k_grad_strides, v_grad_strides, q_out_strides,
    k_out_strides, v_out_strides,
    rows, tokens, prefix, position_rows, heads, blocks, shares,
    GROUP: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, FLAT: tl.constexpr, PER_SAMPLE: tl.constexpr,
    HAS_V: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, IS_LINE: tl.constexpr,
    WANTS_SUMS: tl.constexpr, WANTS_POSITIONS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Gradients before the rotation from those after it, and the sums over tokens.

    ``sums`` is (shares, H, m, EACH), ``position_sums`` (H m, rows, N), ``direction`` (N, H, m).
    """
    head, first, share = work_of(heads, blocks, BLOCKS)
    item = tl.arange(0, ROWS * BLOCKS)
    block = first + item % BLOCKS
    matrix = load_basis(basis, head, block, blocks, SIZE)
    w = load_frequencies(frequencies, head, block, heads, blocks, AXES, SIZE // 2)
    if IS_LINE:
        along = load_frequencies(direction, head, block, heads, blocks, AXES, 1)
    nothing = tl.zeros((ROWS * BLOCKS,), dtype=tl.float32)
    turns = _zeros(nothing, AXES * (SIZE // 2))
    wedges = _zeros(nothing, SIZE * (SIZE - 2) // 2)
    limits = _zeros(nothing, SIZE * (SIZE - 2) // 2 if IS_LINE else 1)
    rest = _zeros(nothing, 2 if IS_LINE else SIZE // 2)
    tiles = tl.cdiv(rows, ROWS)
    for step in tl.range(share, tiles, shares, num_stages=STAGES):
        row = (tiles - 1 - step) * ROWS + item // BLOCKS
        live = (row < rows) & (block < blocks)
        place, turned = place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE)
        cos, sin = turns_of(positions, place, turned, w, AXES, SIZE // 2, FAST)
        scale = nothing
        if IS_LINE:
            for axis in tl.static_range(AXES):
                scale = tl.fma(coordinate(positions, place, turned, axis, AXES), along[axis], scale)
        at = channels(k, row, tokens, head, k_strides, block, SIZE, HALVES, FLAT)
        key = load_item(at, live, blocks, SIZE, HALVES)
        at = channels(k_grad, row, tokens, head, k_grad_strides, block, SIZE, HALVES, FLAT)
        key_grad = load_item(at, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = channels(v_grad, row, tokens, head, v_grad_strides, block, SIZE, False, FLAT)
            value = load_item(at, live, blocks, SIZE, False)
        torque = _zeros(nothing, SIZE // 2)
        pull = nothing
        for member in tl.static_range(GROUP):
            query = head * GROUP + member
            at = channels(q, row, tokens, query, q_strides, block, SIZE, HALVES, FLAT)
            x = load_item(at, live, blocks, SIZE, HALVES)
            at = channels(q_grad, row, tokens, query, q_grad_strides, block, SIZE, HALVES, FLAT)
            g = load_item(at, live, blocks, SIZE, HALVES)
            at = channels(q_out, row, tokens, query, q_out_strides, block, SIZE, HALVES, FLAT)
            h, torque, pull, wedges, limits = _back(
                parts(x, SIZE, HALVES), parts(g, SIZE, HALVES), cos, sin, scale, matrix,
                torque, pull, wedges, limits, SIZE, IS_LINE, WANTS_SUMS,
            )  # fmt: skip
            store_item(at, h, live, blocks, SIZE, HALVES)
        at = channels(k_out, row, tokens, head, k_out_strides, block, SIZE, HALVES, FLAT)
        h, torque, pull, wedges, limits = _back(
            parts(key, SIZE, HALVES), parts(key_grad, SIZE, HALVES), cos, sin, scale, matrix,
            torque, pull, wedges, limits, SIZE, IS_LINE, WANTS_SUMS,
        )  # fmt: skip
        store_item(at, h, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = channels(v_out, row, tokens, head, v_out_strides, block, SIZE, False, FLAT)
            tl.store(at, value[0], mask=live[:, None])
        if WANTS_SUMS:
            turns = _add_turns(turns, positions, place, turned, torque, AXES, SIZE // 2)
            if IS_LINE:
                cube = tl.abs(scale * scale * scale)
                rest = (rest[0] + pull, tl.fma(pull, cube, rest[1]))
            else:
                rest = _add_each(rest, torque, SIZE // 2)
        if WANTS_POSITIONS:
            for axis in tl.static_range(AXES):
                slope = nothing
                for plane in tl.static_range(SIZE // 2):
                    slope = tl.fma(torque[plane], w[axis * (SIZE // 2) + plane], slope)
                at = ((head * blocks + block).to(tl.int64) * rows + row) * AXES + axis
                tl.store(position_sums + at, tl.where(turned, slope, 0.0), mask=live)
    if WANTS_SUMS:
        total = turns + wedges
        if IS_LINE:
            total = total + limits
        total = total + rest + _zeros(nothing, EACH - _sums_of_a_block(AXES, SIZE, IS_LINE))
        every = tl.reshape(join_columns(total, EACH), (ROWS, BLOCKS, EACH))
        block = first + tl.arange(0, BLOCKS)
        at = ((share * heads + head) * blocks + block)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        tl.store(sums + at, tl.sum(every, axis=0), mask=(block < blocks)[:, None])


@triton.jit
def _zeros(nothing, COUNT: tl.constexpr):
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (nothing,)
    return values


@triton.constexpr_function
def _row(entry, size):
    """The first channel of an entry of the wedges; planes come (0, 1), (0, 2), ..., (1, 2), ..."""
    pair, plane = entry // 4, 0
    while pair >= size // 2 - 1 - plane:
        pair, plane = pair - (size // 2 - 1 - plane), plane + 1
    return 2 * plane + entry % 4 // 2


@triton.constexpr_function
def _column(entry, size):
    """Its second channel."""
    pair, plane = entry // 4, 0
    while pair >= size // 2 - 1 - plane:
        pair, plane = pair - (size // 2 - 1 - plane), plane + 1
    return 2 * (plane + 1 + pair) + entry % 2


@triton.jit
def _back(
    y, g, cos, sin, scale, matrix, torque, pull, wedges, limits,
    SIZE: tl.constexpr, IS_LINE: tl.constexpr, WANTS_SUMS: tl.constexpr,
):  # fmt: skip
    """The gradient before the rotation, from rotated vectors y and their gradients; sums grow."""
    turning = ()
    for plane in tl.static_range(SIZE // 2):
        more = tl.fma(y[2 * plane], g[2 * plane + 1], torque[plane])
        turning = turning + (tl.fma(-y[2 * plane + 1], g[2 * plane], more),)
    h = rotated_back(g, cos, sin, SIZE)
    if WANTS_SUMS:
        x = rotated_back(y, cos, sin, SIZE)
        if IS_LINE:
            wedges, limits = _add_chords(h, x, g, y, scale, wedges, limits, SIZE)
            for channel in tl.static_range(SIZE):
                pull = tl.fma(g[channel], g[channel], pull)
        else:
            wedges = _add_wedges(h, x, wedges, SIZE)
    return times(h, matrix, SIZE, False), turning, pull, wedges, limits


@triton.jit
def _add_wedges(h, x, wedges, SIZE: tl.constexpr):
    """wedges + h ^ x, between every two planes."""
    grown = ()
    for at in tl.static_range(SIZE * (SIZE - 2) // 2):
        more = tl.fma(h[_row(at, SIZE)], x[_column(at, SIZE)], wedges[at])
        grown = grown + (tl.fma(-x[_row(at, SIZE)], h[_column(at, SIZE)], more),)
    return grown


@triton.jit
def _add_chords(h, x, g, y, scale, wedges, limits, SIZE: tl.constexpr):
    """wedges + h ^ x - g ^ y and limits + s (h ^ x + g ^ y), between every two planes."""
    chords = ()
    grown = ()
    for at in tl.static_range(SIZE * (SIZE - 2) // 2):
        before = -x[_row(at, SIZE)] * h[_column(at, SIZE)]
        before = tl.fma(h[_row(at, SIZE)], x[_column(at, SIZE)], before)
        both = tl.fma(-y[_row(at, SIZE)], g[_column(at, SIZE)], before)
        both = tl.fma(g[_row(at, SIZE)], y[_column(at, SIZE)], both)
        chords = chords + (wedges[at] + (2.0 * before - both),)
        grown = grown + (tl.fma(scale, both, limits[at]),)
    return chords, grown


@triton.jit
def _add_turns(
    turns, positions, place, turned, torque, AXES: tl.constexpr, PLANES: tl.constexpr
):  # fmt: skip
    grown = ()
    for axis in tl.static_range(AXES):
        x = coordinate(positions, place, turned, axis, AXES)
        for plane in tl.static_range(PLANES):
            grown = grown + (tl.fma(x, torque[plane], turns[axis * PLANES + plane]),)
    return grown


@triton.jit
def _add_each(x, y, COUNT: tl.constexpr):
    values = ()
    for entry in tl.static_range(COUNT):
        values = values + (x[entry] + y[entry],)
    return values
