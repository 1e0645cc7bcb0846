# mypy: disable-error-code="assignment, misc, var-annotated"
"""The rotation of blocks of four or eight channels, each in the registers of one thread.

As rotation.py and rotation_back.py, for the sizes that matter most. An item is a block of a row
(sample x token); its channels are a tuple of vectors over the items of a program, and so are the
entries of its basis, which stay in registers from row to row. The change of basis is plain
multiply-adds in float32: nothing passes through shared memory, and no thread waits for another.

Of the sums over tokens only what is skew is made: the rest of them would be the gradient of moving
S out of the skew matrices, or Q out of the orthogonal ones. With u ^ v = u v^T - v u^T, per block:

    turns   sum x_i (g . J y), axis by plane (N, f)
    wedges  sum h ^ x, for a line less sum g ^ y; of every two planes, the four entries between them
    then    of a torus sum g . J y for every plane
            of a line sum s (h ^ x + g ^ y) as the wedges, sum |g|^2 and sum |g|^2 |s|^3
"""

from __future__ import annotations

import triton
import triton.language as tl

from comrope.ops.kernels.matrices import join_columns, split_columns
from comrope.ops.kernels.tiles import coordinate, cos_sin, place_of, row_offsets

__all__ = ["rotate_blocks_back_kernel", "rotate_blocks_kernel", "sums_of_a_block"]


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
def rotate_blocks_kernel(
    q, k, v, q_out, k_out, v_out, positions, frequencies, basis,
    q_strides, k_strides, v_strides, q_out_strides, k_out_strides, v_out_strides,
    rows, tokens, prefix, position_rows, heads, blocks, shares,
    GROUP: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, FLAT: tl.constexpr, PER_SAMPLE: tl.constexpr,
    HAS_V: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y = Rot(phi) Q^T x for q and k; v, where given, is copied. Strides: sample, head, token."""
    head, first, share = _work(heads, blocks, BLOCKS)
    item = tl.arange(0, ROWS * BLOCKS)
    block = first + item % BLOCKS
    matrix = _basis(basis, head, block, blocks, SIZE)
    w = _frequencies(frequencies, head, block, heads, blocks, AXES, SIZE // 2)
    tiles = tl.cdiv(rows, ROWS)
    for step in range(share, tiles, shares):
        row = (tiles - 1 - step) * ROWS + item // BLOCKS
        live = (row < rows) & (block < blocks)
        place, turned = place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE)
        cos, sin = _turns(positions, place, turned, w, AXES, SIZE // 2, FAST)
        k_at = _channels(k, row, tokens, head, k_strides, block, SIZE, HALVES, FLAT)
        key = _load(k_at, live, blocks, SIZE, HALVES)
        if HAS_V:
            v_at = _channels(v, row, tokens, head, v_strides, block, SIZE, False, FLAT)
            value = _load(v_at, live, blocks, SIZE, False)
        for member in range(GROUP):
            query = head * GROUP + member
            at = _channels(q, row, tokens, query, q_strides, block, SIZE, HALVES, FLAT)
            x = _load(at, live, blocks, SIZE, HALVES)
            at = _channels(q_out, row, tokens, query, q_out_strides, block, SIZE, HALVES, FLAT)
            y = _rotated(_times(_parts(x, SIZE, HALVES), matrix, SIZE, True), cos, sin, SIZE)
            _store(at, y, live, blocks, SIZE, HALVES)
        at = _channels(k_out, row, tokens, head, k_out_strides, block, SIZE, HALVES, FLAT)
        y = _rotated(_times(_parts(key, SIZE, HALVES), matrix, SIZE, True), cos, sin, SIZE)
        _store(at, y, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = _channels(v_out, row, tokens, head, v_out_strides, block, SIZE, False, FLAT)
            tl.store(at, value[0], mask=live[:, None])


@triton.jit
def rotate_blocks_back_kernel(
    q, k, q_grad, k_grad, v_grad, q_out, k_out, v_out, positions, frequencies, basis, direction,
    sums, position_sums,
    q_strides, k_strides, q_grad_strides, k_grad_strides, v_grad_strides, q_out_strides,
    k_out_strides, v_out_strides,
    rows, tokens, prefix, position_rows, heads, blocks, shares,
    GROUP: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, FLAT: tl.constexpr, PER_SAMPLE: tl.constexpr,
    HAS_V: tl.constexpr, FAST: tl.constexpr, IS_LINE: tl.constexpr, WANTS_SUMS: tl.constexpr,
    WANTS_POSITIONS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Gradients before the rotation from those after it, and the sums over tokens.

    ``sums`` is (shares, H, m, EACH), ``position_sums`` (H m, rows, N), ``direction`` (N, H, m).
    """
    head, first, share = _work(heads, blocks, BLOCKS)
    item = tl.arange(0, ROWS * BLOCKS)
    block = first + item % BLOCKS
    matrix = _basis(basis, head, block, blocks, SIZE)
    w = _frequencies(frequencies, head, block, heads, blocks, AXES, SIZE // 2)
    if IS_LINE:
        along = _frequencies(direction, head, block, heads, blocks, AXES, 1)
    nothing = tl.zeros((ROWS * BLOCKS,), dtype=tl.float32)
    turns = _zeros(nothing, AXES * (SIZE // 2))
    wedges = _zeros(nothing, SIZE * (SIZE - 2) // 2)
    limits = _zeros(nothing, SIZE * (SIZE - 2) // 2 if IS_LINE else 1)
    rest = _zeros(nothing, 2 if IS_LINE else SIZE // 2)
    tiles = tl.cdiv(rows, ROWS)
    for step in range(share, tiles, shares):
        row = (tiles - 1 - step) * ROWS + item // BLOCKS
        live = (row < rows) & (block < blocks)
        place, turned = place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE)
        cos, sin = _turns(positions, place, turned, w, AXES, SIZE // 2, FAST)
        scale = nothing
        if IS_LINE:
            for axis in tl.static_range(AXES):
                scale = tl.fma(coordinate(positions, place, turned, axis, AXES), along[axis], scale)
        at = _channels(k, row, tokens, head, k_strides, block, SIZE, HALVES, FLAT)
        key = _load(at, live, blocks, SIZE, HALVES)
        at = _channels(k_grad, row, tokens, head, k_grad_strides, block, SIZE, HALVES, FLAT)
        key_grad = _load(at, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = _channels(v_grad, row, tokens, head, v_grad_strides, block, SIZE, False, FLAT)
            value = _load(at, live, blocks, SIZE, False)
        torque = _zeros(nothing, SIZE // 2)
        pull = nothing
        for member in range(GROUP):
            query = head * GROUP + member
            at = _channels(q, row, tokens, query, q_strides, block, SIZE, HALVES, FLAT)
            x = _load(at, live, blocks, SIZE, HALVES)
            at = _channels(q_grad, row, tokens, query, q_grad_strides, block, SIZE, HALVES, FLAT)
            g = _load(at, live, blocks, SIZE, HALVES)
            at = _channels(q_out, row, tokens, query, q_out_strides, block, SIZE, HALVES, FLAT)
            h, torque, pull, wedges, limits = _back(
                _parts(x, SIZE, HALVES), _parts(g, SIZE, HALVES), cos, sin, scale, matrix,
                torque, pull, wedges, limits, SIZE, IS_LINE, WANTS_SUMS,
            )  # fmt: skip
            _store(at, h, live, blocks, SIZE, HALVES)
        at = _channels(k_out, row, tokens, head, k_out_strides, block, SIZE, HALVES, FLAT)
        h, torque, pull, wedges, limits = _back(
            _parts(key, SIZE, HALVES), _parts(key_grad, SIZE, HALVES), cos, sin, scale, matrix,
            torque, pull, wedges, limits, SIZE, IS_LINE, WANTS_SUMS,
        )  # fmt: skip
        _store(at, h, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = _channels(v_out, row, tokens, head, v_out_strides, block, SIZE, False, FLAT)
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


def sums_of_a_block(axes, size, is_line):
    """How many sums over tokens a block has."""
    wedges = size * (size - 2) // 2
    return axes * (size // 2) + wedges + (wedges + 2 if is_line else size // 2)


_sums_of_a_block = triton.constexpr_function(sums_of_a_block)


@triton.jit
def _work(heads, blocks, BLOCKS: tl.constexpr):
    """The head of this program, its first block, and which share of the rows it has."""
    chunks = tl.cdiv(blocks, BLOCKS)
    unit = tl.program_id(0) % (heads * chunks)
    return unit // chunks, unit % chunks * BLOCKS, tl.program_id(0) // (heads * chunks)


@triton.jit
def _zeros(nothing, COUNT: tl.constexpr):
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (nothing,)
    return values


@triton.jit
def _basis(basis, head, block, blocks, SIZE: tl.constexpr):
    """The entries of the basis of every item, row by row."""
    at = (head * blocks + block)[:, None] * (SIZE * SIZE) + tl.arange(0, SIZE * SIZE)[None, :]
    return split_columns(
        tl.load(basis + at, mask=(block < blocks)[:, None], other=0.0), SIZE * SIZE
    )


@triton.jit
def _frequencies(
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
def _turns(
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
def _channels(
    x, row, tokens, head, strides, block,
    SIZE: tl.constexpr, HALVES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Where the channels of each item lie, (M, SIZE), or (M, SIZE / 2) of its first half."""
    WIDTH: tl.constexpr = SIZE // 2 if HALVES else SIZE
    offset = row_offsets(row, tokens, head, strides, FLAT) + block * WIDTH
    return x + offset[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(at, live, blocks, SIZE: tl.constexpr, HALVES: tl.constexpr):
    """One tile, or two where the channels of a plane lie half a head apart."""
    tile = (tl.load(at, mask=live[:, None], other=0.0),)
    if HALVES:
        tile = tile + (tl.load(at + blocks * (SIZE // 2), mask=live[:, None], other=0.0),)
    return tile


@triton.jit
def _parts(tile, SIZE: tl.constexpr, HALVES: tl.constexpr):
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
def _store(at, x, live, blocks, SIZE: tl.constexpr, HALVES: tl.constexpr):
    """What ``_load`` and ``_parts`` read, written."""
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
def _times(x, matrix, SIZE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Q x, or Q^T x."""
    values = ()
    for i in tl.static_range(SIZE):
        value = x[0] * matrix[i if TRANSPOSED else i * SIZE]
        for j in tl.static_range(1, SIZE):
            value = tl.fma(x[j], matrix[j * SIZE + i if TRANSPOSED else i * SIZE + j], value)
        values = values + (value,)
    return values


@triton.jit
def _rotated(x, cos, sin, SIZE: tl.constexpr):
    values = ()
    for plane in tl.static_range(SIZE // 2):
        first, second = x[2 * plane], x[2 * plane + 1]
        values = values + (
            first * cos[plane] - second * sin[plane],
            first * sin[plane] + second * cos[plane],
        )
    return values


@triton.jit
def _rotated_back(x, cos, sin, SIZE: tl.constexpr):
    values = ()
    for plane in tl.static_range(SIZE // 2):
        first, second = x[2 * plane], x[2 * plane + 1]
        values = values + (
            first * cos[plane] + second * sin[plane],
            second * cos[plane] - first * sin[plane],
        )
    return values


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
    h = _rotated_back(g, cos, sin, SIZE)
    if WANTS_SUMS:
        x = _rotated_back(y, cos, sin, SIZE)
        if IS_LINE:
            wedges, limits = _add_chords(h, x, g, y, scale, wedges, limits, SIZE)
            for channel in tl.static_range(SIZE):
                pull = tl.fma(g[channel], g[channel], pull)
        else:
            wedges = _add_wedges(h, x, wedges, SIZE)
    return _times(h, matrix, SIZE, False), turning, pull, wedges, limits


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
