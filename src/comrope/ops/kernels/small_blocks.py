# mypy: disable-error-code="assignment, misc, var-annotated"
"""The rotation of blocks of four or eight channels, each in the registers of one thread.

It computes the same as general_blocks.py, for the sizes that matter most. The basis stays in
registers from row to row, and the change of basis is plain multiply-adds in float32. Only tiles
that are loaded ahead pass through shared memory, and no thread waits for another.

An item is a block of a row (sample x token). Its channels are a tuple of vectors over the items of
a program, and so are the entries of its basis.

Names are those of general_blocks.py. Of the sums over tokens, only the skew part is computed: the
gradients keep S skew-symmetric, and Q orthogonal. With u ^ v = u v^T - v u^T, the sums of a block
are, in this order:

    turns   sum x_i torque, axis by plane (N, f)
    chords  sum h ^ x; collinear angles: sum h ^ x - g ^ y
            of every two planes, the four entries between them
    then, general angles:    sum torque, plane by plane
          collinear angles:  limits  sum s (h ^ x + g ^ y), in the form of chords
                             weight  sum pull
                             cubes   sum pull |s|^3

All vectors of a token are rotated by the same angles. For collinear angles, g ^ y is therefore
first summed over them, as the wedges of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from comrope.ops.kernels.small_matrices import join_columns, split_columns
from comrope.ops.kernels.tiles import coordinate, cos_sin, program_of, row_offsets, tile_of

__all__ = ["rotate_blocks_backward_kernel", "rotate_blocks_kernel", "sums_of_a_block"]


def sums_of_a_block(axes: int, size: int, is_collinear: bool) -> int:
    """Return how many sums over tokens a block has."""
    wedges = size * (size - 2) // 2
    return axes * (size // 2) + wedges + (wedges + 2 if is_collinear else size // 2)


_sums_of_a_block = triton.constexpr_function(sums_of_a_block)


@triton.jit
def rotate_blocks_kernel(tensors, angles, strides, work, META: tl.constexpr):
    """Write y = Rot(phi) Q^T x for q and k. Values, where given, are copied."""
    program = program_of(work, META.BLOCKS)
    item = tl.arange(0, META.ROWS * META.BLOCKS)
    block = program.block + item % META.BLOCKS
    matrix = _load_basis(angles.basis, program.head, block, work, META)
    w = _load_frequencies(angles.frequencies, program.head, block, work, META.SIZE // 2, META)
    x, out = tensors.x, tensors.out
    tiles = tl.cdiv(work.rows, META.ROWS)
    for step in tl.range(program.share, tiles, work.shares, num_stages=META.STAGES):
        row = (tiles - 1 - step) * META.ROWS + item // META.BLOCKS
        live = (row < work.rows) & (block < work.blocks)
        tile = tile_of(program.head, block, row, live, work, META)
        phi = _cos_sin(angles.positions, tile, w, META)
        key = _load(x.k, strides.x.k, tile.head, tile, work, META.HALVES, META)
        if META.HAS_V:
            value = _load(x.v, strides.x.v, tile.head, tile, work, False, META)
        for member in tl.static_range(META.GROUP):
            head = tile.head * META.GROUP + member
            query = _load(x.q, strides.x.q, head, tile, work, META.HALVES, META)
            at = _addresses(out.q, strides.out.q, head, tile, work, META.HALVES, META)
            _store(at, _rotate(query, phi, matrix, META), tile, work, META)
        at = _addresses(out.k, strides.out.k, tile.head, tile, work, META.HALVES, META)
        _store(at, _rotate(key, phi, matrix, META), tile, work, META)
        if META.HAS_V:
            at = _addresses(out.v, strides.out.v, tile.head, tile, work, False, META)
            tl.store(at, value[0], mask=live[:, None])


class _Sums(NamedTuple):
    """Sums over the vectors of a token; ``wedges`` of general angles, over all tokens."""

    torque: Any  # one a plane
    pull: Any
    wedges: Any  # collinear angles: g ^ y; general angles: h ^ x


@triton.jit
def rotate_blocks_backward_kernel(tensors, angles, sums, strides, work, META: tl.constexpr):
    """Write the gradients before the rotation, and the sums over tokens.

    ``sums.angles`` is (shares, H, m, EACH), ``sums.positions`` (H m, rows, N),
    ``angles.direction`` (N, H, m).
    """
    PLANES: tl.constexpr = META.SIZE // 2
    WEDGES: tl.constexpr = META.SIZE * (META.SIZE - 2) // 2
    program = program_of(work, META.BLOCKS)
    item = tl.arange(0, META.ROWS * META.BLOCKS)
    block = program.block + item % META.BLOCKS
    matrix = _load_basis(angles.basis, program.head, block, work, META)
    w = _load_frequencies(angles.frequencies, program.head, block, work, PLANES, META)
    if META.IS_COLLINEAR:
        direction = _load_frequencies(angles.direction, program.head, block, work, 1, META)
    zero = tl.zeros((META.ROWS * META.BLOCKS,), dtype=tl.float32)
    turns = _repeat(zero, META.AXES * PLANES)
    chords = _repeat(zero, WEDGES)
    limits = _repeat(zero, WEDGES if META.IS_COLLINEAR else 1)
    rest = _repeat(zero, 2 if META.IS_COLLINEAR else PLANES)
    x, grads, out = tensors.x, tensors.grads, tensors.out
    tiles = tl.cdiv(work.rows, META.ROWS)
    for step in tl.range(program.share, tiles, work.shares, num_stages=META.STAGES):
        row = (tiles - 1 - step) * META.ROWS + item // META.BLOCKS
        live = (row < work.rows) & (block < work.blocks)
        tile = tile_of(program.head, block, row, live, work, META)
        phi = _cos_sin(angles.positions, tile, w, META)
        scale = zero
        if META.IS_COLLINEAR:
            for axis in tl.static_range(META.AXES):
                place = coordinate(angles.positions, axis, tile, META)
                scale = tl.fma(place, direction[axis], scale)
        key = _load(x.k, strides.x.k, tile.head, tile, work, META.HALVES, META)
        key_grad = _load(grads.k, strides.grads.k, tile.head, tile, work, META.HALVES, META)
        if META.HAS_V:
            value = _load(grads.v, strides.grads.v, tile.head, tile, work, False, META)
        wedges = chords
        if META.IS_COLLINEAR:
            wedges = _repeat(zero, WEDGES)
        grown = _Sums(_repeat(zero, PLANES), zero, wedges)
        for member in tl.static_range(META.GROUP):
            head = tile.head * META.GROUP + member
            query = _load(x.q, strides.x.q, head, tile, work, META.HALVES, META)
            query_grad = _load(grads.q, strides.grads.q, head, tile, work, META.HALVES, META)
            at = _addresses(out.q, strides.out.q, head, tile, work, META.HALVES, META)
            before, grown = _rotate_back(query, query_grad, phi, matrix, grown, META)
            _store(at, before, tile, work, META)
        at = _addresses(out.k, strides.out.k, tile.head, tile, work, META.HALVES, META)
        before, grown = _rotate_back(key, key_grad, phi, matrix, grown, META)
        _store(at, before, tile, work, META)
        if META.HAS_V:
            at = _addresses(out.v, strides.out.v, tile.head, tile, work, False, META)
            tl.store(at, value[0], mask=live[:, None])
        if META.WANTS_ANGLES:
            turns = _add_turns(turns, angles.positions, tile, grown.torque, META)
            if META.IS_COLLINEAR:
                chords, limits = _add_wedges(chords, limits, grown.wedges, phi, scale, PLANES)
                cube = tl.abs(scale * scale * scale)
                rest = (rest[0] + grown.pull, tl.fma(grown.pull, cube, rest[1]))
            else:
                chords = grown.wedges
                rest = _add(rest, grown.torque, PLANES)
        if META.WANTS_POSITIONS:
            _store_positions(sums.positions, grown.torque, w, tile, work, META)
    if META.WANTS_ANGLES:
        if META.IS_COLLINEAR:
            total = turns + _entries(chords, WEDGES // 4)
            total = total + _entries(limits, WEDGES // 4)
        else:
            total = turns + chords
        COUNT: tl.constexpr = _sums_of_a_block(META.AXES, META.SIZE, META.IS_COLLINEAR)
        total = total + rest + _repeat(zero, META.EACH - COUNT)
        total = tl.reshape(join_columns(total, META.EACH), (META.ROWS, META.BLOCKS, META.EACH))
        block = program.block + tl.arange(0, META.BLOCKS)
        at = ((program.share * work.heads + program.head) * work.blocks + block)[:, None]
        at = at * META.EACH + tl.arange(0, META.EACH)[None, :]
        tl.store(sums.angles + at, tl.sum(total, axis=0), mask=(block < work.blocks)[:, None])


@triton.jit
def _load_basis(basis, head, block, work, META: tl.constexpr):
    """Load the entries of the basis of every item, row by row."""
    COUNT: tl.constexpr = META.SIZE * META.SIZE
    at = (head * work.blocks + block)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    entries = tl.load(basis + at, mask=(block < work.blocks)[:, None], other=0.0)
    return split_columns(entries, COUNT)


@triton.jit
def _load_frequencies(
    frequencies, head, block, work, PLANES: tl.constexpr, META: tl.constexpr
):  # fmt: skip
    """Load one value of every axis and plane, from (N, H, m, PLANES)."""
    values = ()
    for axis in tl.static_range(META.AXES):
        at = ((axis * work.heads + head) * work.blocks + block) * PLANES
        for plane in tl.static_range(PLANES):
            value = tl.load(frequencies + at + plane, mask=block < work.blocks, other=0.0)
            values = values + (value,)
    return values


@triton.jit
def _cos_sin(positions, tile, w, META: tl.constexpr):
    """Return the cosines and the sines of every plane."""
    x = ()
    for axis in tl.static_range(META.AXES):
        x = x + (coordinate(positions, axis, tile, META),)
    cosines = ()
    sines = ()
    for plane in tl.static_range(META.SIZE // 2):
        angle = x[0] * w[plane]
        for axis in tl.static_range(1, META.AXES):
            angle = tl.fma(x[axis], w[axis * (META.SIZE // 2) + plane], angle)
        cos, sin = cos_sin(angle, META.FAST)
        cosines = cosines + (cos,)
        sines = sines + (sin,)
    return cosines, sines


@triton.jit
def _addresses(x, strides, head, tile, work, HALVES: tl.constexpr, META: tl.constexpr):
    """Return where the channels of each item are, (M, SIZE).

    HALVES: those of the first half of the head, (M, SIZE / 2).
    """
    WIDTH: tl.constexpr = META.SIZE // 2 if HALVES else META.SIZE
    offset = row_offsets(tile.row, head, strides, work, META) + tile.block * WIDTH
    return x + offset[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(x, strides, head, tile, work, HALVES: tl.constexpr, META: tl.constexpr):
    """Load the channels: one tensor, or two where those of a plane are half a head apart."""
    at = _addresses(x, strides, head, tile, work, HALVES, META)
    loaded = (tl.load(at, mask=tile.live[:, None], other=0.0),)
    if HALVES:
        second = at + work.blocks * (META.SIZE // 2)
        loaded = loaded + (tl.load(second, mask=tile.live[:, None], other=0.0),)
    return loaded


@triton.jit
def _channels(loaded, META: tl.constexpr):
    """Return the loaded channels in float32, one vector each, planes after each other."""
    if META.HALVES:
        first = split_columns(loaded[0].to(tl.float32), META.SIZE // 2)
        second = split_columns(loaded[1].to(tl.float32), META.SIZE // 2)
        values = ()
        for plane in tl.static_range(META.SIZE // 2):
            values = values + (first[plane], second[plane])
    else:
        values = split_columns(loaded[0].to(tl.float32), META.SIZE)
    return values


@triton.jit
def _store(at, x, tile, work, META: tl.constexpr):
    """Store the channels x where ``_load`` would read them."""
    if META.HALVES:
        first, second = (), ()
        for plane in tl.static_range(META.SIZE // 2):
            first = first + (x[2 * plane],)
            second = second + (x[2 * plane + 1],)
        _store_columns(at, join_columns(first, META.SIZE // 2), tile)
        second = join_columns(second, META.SIZE // 2)
        _store_columns(at + work.blocks * (META.SIZE // 2), second, tile)
    else:
        _store_columns(at, join_columns(x, META.SIZE), tile)


@triton.jit
def _store_columns(at, columns, tile):
    tl.store(at, columns.to(at.dtype.element_ty), mask=tile.live[:, None])


@triton.jit
def _multiply(x, matrix, TRANSPOSED: tl.constexpr, META: tl.constexpr):
    """Return Q x, or Q^T x."""
    SIZE: tl.constexpr = META.SIZE
    values = ()
    for i in tl.static_range(SIZE):
        value = x[0] * matrix[i if TRANSPOSED else i * SIZE]
        for j in tl.static_range(1, SIZE):
            value = tl.fma(x[j], matrix[j * SIZE + i if TRANSPOSED else i * SIZE + j], value)
        values = values + (value,)
    return values


@triton.jit
def _rotate(loaded, phi, matrix, META: tl.constexpr):
    """Return Rot(phi) Q^T x for x as loaded."""
    x = _multiply(_channels(loaded, META), matrix, True, META)
    return _rotate_planes(x, phi[0], phi[1], META)


@triton.jit
def _rotate_planes(x, cos, sin, META: tl.constexpr):
    values = ()
    for plane in tl.static_range(META.SIZE // 2):
        first, second = x[2 * plane], x[2 * plane + 1]
        values = values + (
            first * cos[plane] - second * sin[plane],
            first * sin[plane] + second * cos[plane],
        )
    return values


@triton.jit
def _rotate_planes_back(x, phi, META: tl.constexpr):
    opposite = ()
    for plane in tl.static_range(META.SIZE // 2):
        opposite = opposite + (-phi[1][plane],)
    return _rotate_planes(x, phi[0], opposite, META)


@triton.jit
def _rotate_back(y, g, phi, matrix, sums, META: tl.constexpr):
    """Return Q h for a rotated vector y and its gradient g, as loaded, and the sums with both."""
    y, g = _channels(y, META), _channels(g, META)
    torque = ()
    for plane in tl.static_range(META.SIZE // 2):
        more = tl.fma(y[2 * plane], g[2 * plane + 1], sums.torque[plane])
        torque = torque + (tl.fma(-y[2 * plane + 1], g[2 * plane], more),)
    h = _rotate_planes_back(g, phi, META)
    pull, wedges = sums.pull, sums.wedges
    if META.WANTS_ANGLES:
        if META.IS_COLLINEAR:
            wedges = _add_wedge(wedges, g, y, META.SIZE)
            for channel in tl.static_range(META.SIZE):
                pull = tl.fma(g[channel], g[channel], pull)
        else:
            wedges = _add_wedge(wedges, h, _rotate_planes_back(y, phi, META), META.SIZE)
    return _multiply(h, matrix, False, META), _Sums(torque, pull, wedges)


@triton.constexpr_function
def _first(pair, planes):
    """Return the first plane of a pair. Pairs come (0, 1), (0, 2), ..., (1, 2), ..."""
    plane = 0
    while pair >= planes - 1 - plane:
        pair, plane = pair - (planes - 1 - plane), plane + 1
    return plane


@triton.constexpr_function
def _second(pair, planes):
    """Return its second plane."""
    plane = 0
    while pair >= planes - 1 - plane:
        pair, plane = pair - (planes - 1 - plane), plane + 1
    return plane + 1 + pair


@triton.constexpr_function
def _row(entry, size):
    """Return the first channel of an entry of the wedges, four for every pair of planes."""
    return 2 * _first(entry // 4, size // 2) + entry % 4 // 2


@triton.constexpr_function
def _column(entry, size):
    """Return its second channel."""
    return 2 * _second(entry // 4, size // 2) + entry % 2


@triton.jit
def _add_wedge(wedges, u, v, SIZE: tl.constexpr):
    """Return wedges + u ^ v, between every two planes."""
    grown = ()
    for at in tl.static_range(SIZE * (SIZE - 2) // 2):
        more = tl.fma(u[_row(at, SIZE)], v[_column(at, SIZE)], wedges[at])
        grown = grown + (tl.fma(-v[_row(at, SIZE)], u[_column(at, SIZE)], more),)
    return grown


@triton.jit
def _add_wedges(chords, limits, wedges, phi, scale, PLANES: tl.constexpr):
    """Return chords + 2 (h ^ x - g ^ y) and limits + 2 s (h ^ x + g ^ y), from g ^ y = wedges.

    Between planes j and k, g ^ y is the sum of p + q J, which commutes with J, and of
    (r + t J) diag(1, -1). To become h ^ x, the former is rotated by the difference of the planes'
    angles, the latter by their sum. Chords and limits of a pair are these four: p, q, r, t.
    """
    cos, sin = phi
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
def _entries(parts, PAIRS: tl.constexpr):
    """Return the four entries between every pair of planes, from their p, q, r, t."""
    values = ()
    for pair in tl.static_range(PAIRS):
        p, q, r, t = parts[4 * pair], parts[4 * pair + 1], parts[4 * pair + 2], parts[4 * pair + 3]
        values = values + (0.5 * (p + r), 0.5 * (t - q), 0.5 * (q + t), 0.5 * (p - r))
    return values


@triton.jit
def _add_turns(turns, positions, tile, torque, META: tl.constexpr):
    """Return turns + x_i torque, for every axis and plane."""
    grown = ()
    for axis in tl.static_range(META.AXES):
        x = coordinate(positions, axis, tile, META)
        for plane in tl.static_range(META.SIZE // 2):
            turn = turns[axis * (META.SIZE // 2) + plane]
            grown = grown + (tl.fma(x, torque[plane], turn),)
    return grown


@triton.jit
def _store_positions(sums, torque, w, tile, work, META: tl.constexpr):
    """Store sum_k w_ik torque_k, the gradient of the position of every item, along every axis."""
    for axis in tl.static_range(META.AXES):
        slope = tl.zeros_like(torque[0])
        for plane in tl.static_range(META.SIZE // 2):
            slope = tl.fma(torque[plane], w[axis * (META.SIZE // 2) + plane], slope)
        at = (tile.head * work.blocks + tile.block).to(tl.int64) * work.rows + tile.row
        at = at * META.AXES + axis
        tl.store(sums + at, tl.where(tile.rotates, slope, 0.0), mask=tile.live)


@triton.jit
def _repeat(x, COUNT: tl.constexpr):
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (x,)
    return values


@triton.jit
def _add(x, y, COUNT: tl.constexpr):
    values = ()
    for entry in tl.static_range(COUNT):
        values = values + (x[entry] + y[entry],)
    return values
