# mypy: disable-error-code="assignment, misc, var-annotated"
"""The rotation of blocks of four or eight channels, each in the registers of one thread.

As general_blocks.py, for the sizes that matter most. The basis stays in registers from row to row,
and its change is plain multiply-adds in float32: nothing passes through shared memory but what is
fetched ahead, and no thread waits for another.

What the kernels of small blocks are made of: a block of a row in the registers of one thread.

An item is a block of a row (sample x token). Its channels are a tuple of vectors over the items of
a program, and so are the entries of its basis.

The way back through the rotation of blocks of four or eight channels.

As general_blocks.py, with a block in the registers of one thread. Of the sums over
tokens only what is skew is made: the rest of them would be the gradient of moving S out of the skew
matrices, or Q out of the orthogonal ones. With u ^ v = u v^T - v u^T, for every block in this
order:

    turns   sum x_i (g . J y), axis by plane (N, f)
    chords  sum h ^ x, for a line less sum g ^ y; of every two planes, the four entries between them
    then    of a torus sum g . J y for every plane
            of a line sum s (h ^ x + g ^ y) in the same way, sum |g|^2 and sum |g|^2 |s|^3

All vectors of a token turn by the same angles: of a line, g ^ y is added up over them first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from comrope.ops.kernels.small_matrices import join_columns, split_columns
from comrope.ops.kernels.tiles import coordinate, cos_sin, place_of, row_offsets

__all__ = ["rotate_blocks_back_kernel", "rotate_blocks_kernel", "sums_of_a_block"]


@triton.jit
def rotate_blocks_kernel(
    q, k, v, q_out, k_out, v_out, positions, frequencies, basis,
    q_strides, k_strides, v_strides, q_out_strides, k_out_strides, v_out_strides,
    rows, tokens, prefix, position_rows, heads, blocks, shares,
    GROUP: tl.constexpr, AXES: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, FLAT: tl.constexpr, PER_SAMPLE: tl.constexpr,
    HAS_V: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = Rot(phi) Q^T x for q and k; v, where given, is copied. Strides: sample, head, token."""
    head, first, share = work_of(heads, blocks, BLOCKS)
    item = tl.arange(0, ROWS * BLOCKS)
    block = first + item % BLOCKS
    matrix = load_basis(basis, head, block, blocks, SIZE)
    w = load_frequencies(frequencies, head, block, heads, blocks, AXES, SIZE // 2)
    tiles = tl.cdiv(rows, ROWS)
    for step in tl.range(share, tiles, shares, num_stages=STAGES):
        row = (tiles - 1 - step) * ROWS + item // BLOCKS
        live = (row < rows) & (block < blocks)
        place, turned = place_of(row, live, tokens, prefix, position_rows, PER_SAMPLE)
        cos, sin = turns_of(positions, place, turned, w, AXES, SIZE // 2, FAST)
        k_at = channels(k, row, tokens, head, k_strides, block, SIZE, HALVES, FLAT)
        key = load_item(k_at, live, blocks, SIZE, HALVES)
        if HAS_V:
            v_at = channels(v, row, tokens, head, v_strides, block, SIZE, False, FLAT)
            value = load_item(v_at, live, blocks, SIZE, False)
        for member in tl.static_range(GROUP):
            query = head * GROUP + member
            at = channels(q, row, tokens, query, q_strides, block, SIZE, HALVES, FLAT)
            x = load_item(at, live, blocks, SIZE, HALVES)
            at = channels(q_out, row, tokens, query, q_out_strides, block, SIZE, HALVES, FLAT)
            y = rotated(times(parts(x, SIZE, HALVES), matrix, SIZE, True), cos, sin, SIZE)
            store_item(at, y, live, blocks, SIZE, HALVES)
        at = channels(k_out, row, tokens, head, k_out_strides, block, SIZE, HALVES, FLAT)
        y = rotated(times(parts(key, SIZE, HALVES), matrix, SIZE, True), cos, sin, SIZE)
        store_item(at, y, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = channels(v_out, row, tokens, head, v_out_strides, block, SIZE, False, FLAT)
            tl.store(at, value[0], mask=live[:, None])


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
    chords = _zeros(nothing, SIZE * (SIZE - 2) // 2)
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
        wedges = chords
        if IS_LINE:
            wedges = _zeros(nothing, SIZE * (SIZE - 2) // 2)
        pull = nothing
        for member in tl.static_range(GROUP):
            query = head * GROUP + member
            at = channels(q, row, tokens, query, q_strides, block, SIZE, HALVES, FLAT)
            x = load_item(at, live, blocks, SIZE, HALVES)
            at = channels(q_grad, row, tokens, query, q_grad_strides, block, SIZE, HALVES, FLAT)
            g = load_item(at, live, blocks, SIZE, HALVES)
            at = channels(q_out, row, tokens, query, q_out_strides, block, SIZE, HALVES, FLAT)
            h, torque, pull, wedges = _back(
                parts(x, SIZE, HALVES), parts(g, SIZE, HALVES), cos, sin, matrix,
                torque, pull, wedges, SIZE, IS_LINE, WANTS_SUMS,
            )  # fmt: skip
            store_item(at, h, live, blocks, SIZE, HALVES)
        at = channels(k_out, row, tokens, head, k_out_strides, block, SIZE, HALVES, FLAT)
        h, torque, pull, wedges = _back(
            parts(key, SIZE, HALVES), parts(key_grad, SIZE, HALVES), cos, sin, matrix,
            torque, pull, wedges, SIZE, IS_LINE, WANTS_SUMS,
        )  # fmt: skip
        store_item(at, h, live, blocks, SIZE, HALVES)
        if HAS_V:
            at = channels(v_out, row, tokens, head, v_out_strides, block, SIZE, False, FLAT)
            tl.store(at, value[0], mask=live[:, None])
        if WANTS_SUMS:
            turns = _add_turns(turns, positions, place, turned, torque, AXES, SIZE // 2)
            if IS_LINE:
                chords, limits = _add_wedges(chords, limits, wedges, cos, sin, scale, SIZE // 2)
                cube = tl.abs(scale * scale * scale)
                rest = (rest[0] + pull, tl.fma(pull, cube, rest[1]))
            else:
                chords = wedges
                rest = _add_each(rest, torque, SIZE // 2)
        if WANTS_POSITIONS:
            for axis in tl.static_range(AXES):
                slope = nothing
                for plane in tl.static_range(SIZE // 2):
                    slope = tl.fma(torque[plane], w[axis * (SIZE // 2) + plane], slope)
                at = ((head * blocks + block).to(tl.int64) * rows + row) * AXES + axis
                tl.store(position_sums + at, tl.where(turned, slope, 0.0), mask=live)
    if WANTS_SUMS:
        if IS_LINE:
            total = turns + _entries(chords, SIZE * (SIZE - 2) // 8)
            total = total + _entries(limits, SIZE * (SIZE - 2) // 8)
        else:
            total = turns + chords
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
def _first(pair, planes):
    """The first plane of a pair; they come (0, 1), (0, 2), ..., (1, 2), ..."""
    plane = 0
    while pair >= planes - 1 - plane:
        pair, plane = pair - (planes - 1 - plane), plane + 1
    return plane


@triton.constexpr_function
def _second(pair, planes):
    """Its second plane."""
    plane = 0
    while pair >= planes - 1 - plane:
        pair, plane = pair - (planes - 1 - plane), plane + 1
    return plane + 1 + pair


@triton.constexpr_function
def _row(entry, size):
    """The first channel of an entry of the wedges, four for every pair of planes."""
    return 2 * _first(entry // 4, size // 2) + entry % 4 // 2


@triton.constexpr_function
def _column(entry, size):
    """Its second channel."""
    return 2 * _second(entry // 4, size // 2) + entry % 2


@triton.jit
def _back(
    y, g, cos, sin, matrix, torque, pull, wedges,
    SIZE: tl.constexpr, IS_LINE: tl.constexpr, WANTS_SUMS: tl.constexpr,
):  # fmt: skip
    """The gradient before the rotation, from rotated vectors y and their gradients; sums grow:
    torque by g . J y, pull by |g|^2, wedges of a line by g ^ y, and else by h ^ x.
    """
    turning = ()
    for plane in tl.static_range(SIZE // 2):
        more = tl.fma(y[2 * plane], g[2 * plane + 1], torque[plane])
        turning = turning + (tl.fma(-y[2 * plane + 1], g[2 * plane], more),)
    h = rotated_back(g, cos, sin, SIZE)
    if WANTS_SUMS:
        if IS_LINE:
            wedges = _wedged(g, y, wedges, SIZE)
            for channel in tl.static_range(SIZE):
                pull = tl.fma(g[channel], g[channel], pull)
        else:
            wedges = _wedged(h, rotated_back(y, cos, sin, SIZE), wedges, SIZE)
    return times(h, matrix, SIZE, False), turning, pull, wedges


@triton.jit
def _wedged(u, v, wedges, SIZE: tl.constexpr):
    """wedges + u ^ v, between every two planes."""
    grown = ()
    for at in tl.static_range(SIZE * (SIZE - 2) // 2):
        more = tl.fma(u[_row(at, SIZE)], v[_column(at, SIZE)], wedges[at])
        grown = grown + (tl.fma(-v[_row(at, SIZE)], u[_column(at, SIZE)], more),)
    return grown


@triton.jit
def _add_wedges(
    chords, limits, wedges, cos, sin, scale, PLANES: tl.constexpr
):  # fmt: skip
    """Twice h ^ x - g ^ y to the chords, and twice s (h ^ x + g ^ y) to the limits, from g ^ y.

    What of it between planes j and k commutes with J, as p + q J, is turned by the difference
    of their angles on the way to h ^ x, and the rest, (r + t J) diag(1, -1), by their sum. The four
    numbers p, q, r, t of every pair are added up as they are.
    """
    grown = ()
    more = ()
    for pair in tl.static_range(PLANES * (PLANES - 1) // 2):
        cos1, sin1 = cos[_first(pair, PLANES)], sin[_first(pair, PLANES)]
        cos2, sin2 = cos[_second(pair, PLANES)], sin[_second(pair, PLANES)]
        same, mixed = cos1 * cos2, sin1 * cos2
        turn_cos = (tl.fma(sin1, sin2, same), tl.fma(-sin1, sin2, same))
        turn_sin = (tl.fma(-cos1, sin2, mixed), tl.fma(cos1, sin2, mixed))
        z11, z12, z21, z22 = (
            wedges[4 * pair], wedges[4 * pair + 1], wedges[4 * pair + 2], wedges[4 * pair + 3],
        )  # fmt: skip
        after = (z11 + z22, z21 - z12, z11 - z22, z21 + z12)
        for part in tl.static_range(2):
            real, imaginary = after[2 * part], after[2 * part + 1]
            before_real = tl.fma(imaginary, turn_sin[part], real * turn_cos[part])
            before_imaginary = tl.fma(-real, turn_sin[part], imaginary * turn_cos[part])
            grown = grown + (
                chords[4 * pair + 2 * part] + (before_real - real),
                chords[4 * pair + 2 * part + 1] + (before_imaginary - imaginary),
            )
            more = more + (
                tl.fma(scale, before_real + real, limits[4 * pair + 2 * part]),
                tl.fma(scale, before_imaginary + imaginary, limits[4 * pair + 2 * part + 1]),
            )
    return grown, more


@triton.jit
def _entries(parts_of_pairs, PAIRS: tl.constexpr):
    """p, q, r, t of every pair of planes to the four entries between them."""
    values = ()
    for pair in tl.static_range(PAIRS):
        p, q = parts_of_pairs[4 * pair], parts_of_pairs[4 * pair + 1]
        r, t = parts_of_pairs[4 * pair + 2], parts_of_pairs[4 * pair + 3]
        values = values + (0.5 * (p + r), 0.5 * (t - q), 0.5 * (q + t), 0.5 * (p - r))
    return values


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
