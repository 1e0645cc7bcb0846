"""From the sums over tokens to the gradients of the angles: one small kernel a layer.

``skew_gradient`` in ops/collinear.py computes the same, operation by operation. Here a program has
one block of one head, as four matrices (PADDED, PADDED): rows and columns that come first in their
planes, and second. On these all of it is elementwise, but for the change of basis.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finish_kernel"]


@triton.jit
def finish_kernel(
    sums, planes, direction, basis, plane_grad, matrix_grad, shares, blocks, threshold,
    AXES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr,
    CHUNK: tl.constexpr, IS_LINE: tl.constexpr, SKEW: tl.constexpr,
):  # fmt: skip
    """``sums`` (shares, H m, EACH), as general_blocks.py leaves them, or with SKEW small_blocks.py.

    Of a torus: ``plane_grad`` (N, H m, f) of the frequencies, ``matrix_grad`` (H m, b, b) of the
    basis. Of a line: (N, H m) of the direction, (H m, b, b) of the skew matrix, whose frequencies
    are ``planes`` (H m, f).
    """
    block = tl.program_id(0)
    stride = blocks * EACH
    at = sums + block * EACH
    plane = tl.arange(0, PADDED)
    real = plane < SIZE // 2
    turning = tl.zeros((PADDED,), dtype=tl.float32)
    if IS_LINE:
        w = tl.load(planes + block * (SIZE // 2) + plane, mask=real, other=0.0)
    for axis in tl.static_range(AXES):
        turns = _total(at + axis * (SIZE // 2) + plane, real, shares, stride, PADDED, CHUNK)
        to = axis * blocks + block
        if IS_LINE:
            tl.store(plane_grad + to, tl.sum(turns * w, axis=0))
            if SKEW:
                turning += turns * tl.load(direction + to)
        else:
            tl.store(plane_grad + to * (SIZE // 2) + plane, turns, mask=real)
    at += AXES * (SIZE // 2)
    wedges: tl.constexpr = SIZE * (SIZE - 2) // 2 if SKEW else SIZE * SIZE
    weights: tl.constexpr = 1 if SKEW else triton.next_power_of_2(SIZE) // 2
    if SKEW:
        if not IS_LINE:
            turning = _total(at + wedges + plane, real, shares, stride, PADDED, CHUNK)
        a11, a12, a21, a22 = _skew(at, shares, stride, SIZE, PADDED, CHUNK)
        if not IS_LINE:
            a12, a21 = _with_planes(a12, a21, -0.5 * turning, PADDED)
    else:
        a11, a12, a21, a22 = _matrix(at, shares, stride, SIZE, PADDED, CHUNK)
    if IS_LINE:
        at += wedges
        if SKEW:
            l11, l12, l21, l22 = _skew(at, shares, stride, SIZE, PADDED, CHUNK)
            l11, l12, l21, l22 = 0.5 * l11, 0.5 * l12, 0.5 * l21, 0.5 * l22
            l12, l21 = _with_planes(l12, l21, -0.5 * turning, PADDED)
        else:
            l11, l12, l21, l22 = _matrix(at, shares, stride, SIZE, PADDED, CHUNK)
        at += wedges
        held = plane < weights
        mass = tl.sum(_total(at + plane, held, shares, stride, PADDED, CHUNK), axis=0)
        at += weights
        cubes = tl.sum(_total(at + plane, held, shares, stride, PADDED, CHUNK), axis=0)
        mean = cubes / tl.where(mass > 0, mass, 1.0)
        reach = tl.where(mean > 0, tl.exp2(tl.log2(tl.where(mean > 0, mean, 1.0)) / 3), mean)
        # The commuting part sees the difference of two frequencies, the rest sees their sum;
        # _turn_rows of the numerator is written into the order of its parts.
        gap = w[:, None] - w[None, :]
        same = _divided(-a21, gap, l11, reach, threshold)
        same += _divided(a12, gap, l22, reach, threshold)
        cross = _divided(-a22, gap, l12, reach, threshold)
        cross -= _divided(a11, gap, l21, reach, threshold)
        gap = w[:, None] + w[None, :]
        other = _divided(-a21, gap, l11, reach, threshold)
        other -= _divided(a12, gap, l22, reach, threshold)
        mixed = _divided(-a22, gap, l12, reach, threshold)
        mixed += _divided(a11, gap, l21, reach, threshold)
        a11, a22 = 0.5 * (same + other), 0.5 * (same - other)
        a12, a21 = 0.5 * (mixed + cross), 0.5 * (mixed - cross)
    else:  # the gradient of the basis is Q outer^T
        a11, a22 = tl.trans(a11), tl.trans(a22)
        a12, a21 = tl.trans(a21), tl.trans(a12)
    row = tl.arange(0, 2 * PADDED)
    at = block * SIZE * SIZE + row[:, None] * SIZE + 2 * plane[None, :]
    inside = row[:, None] < SIZE
    first = inside & (2 * plane < SIZE)[None, :]
    second = inside & (2 * plane + 1 < SIZE)[None, :]
    q1 = tl.load(basis + at, mask=first, other=0.0)
    q2 = tl.load(basis + at + 1, mask=second, other=0.0)
    left1 = _product(q1, a11, PADDED) + _product(q2, a21, PADDED)
    left2 = _product(q1, a12, PADDED) + _product(q2, a22, PADDED)
    if IS_LINE:
        whole = _product(left1, tl.trans(q1), PADDED) + _product(left2, tl.trans(q2), PADDED)
        at = block * SIZE * SIZE + row[:, None] * SIZE + row[None, :]
        tl.store(matrix_grad + at, whole, mask=inside & (row < SIZE)[None, :])
    else:
        tl.store(matrix_grad + at, left1, mask=first)
        tl.store(matrix_grad + at + 1, left2, mask=second)


@triton.jit
def _total(at, mask, shares, stride, PADDED: tl.constexpr, CHUNK: tl.constexpr):
    """Of numbers (PADDED,), over all shares, in their order."""
    total = tl.zeros((PADDED,), dtype=tl.float32)
    for begin in range(0, shares, CHUNK):
        share = begin + tl.arange(0, CHUNK)
        part = tl.load(
            at[None, :] + share[:, None] * stride,
            mask=(share < shares)[:, None] & mask[None, :],
            other=0.0,
        )
        total += tl.sum(part, axis=0)
    return total


@triton.jit
def _matrix(
    at, shares, stride, SIZE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The four parts of a (b, b), over all shares; a phantom channel completes an odd block."""
    e = tl.arange(0, PADDED * PADDED)
    i = 2 * (e // PADDED)
    j = 2 * (e % PADDED)
    at = at + i * SIZE + j
    square: tl.constexpr = PADDED * PADDED
    first_row, first_column = i < SIZE, j < SIZE
    second_row, second_column = i + 1 < SIZE, j + 1 < SIZE
    a11 = _total(at, first_row & first_column, shares, stride, square, CHUNK)
    a12 = _total(at + 1, first_row & second_column, shares, stride, square, CHUNK)
    a21 = _total(at + SIZE, second_row & first_column, shares, stride, square, CHUNK)
    a22 = _total(at + SIZE + 1, second_row & second_column, shares, stride, square, CHUNK)
    return (
        tl.reshape(a11, (PADDED, PADDED)), tl.reshape(a12, (PADDED, PADDED)),
        tl.reshape(a21, (PADDED, PADDED)), tl.reshape(a22, (PADDED, PADDED)),
    )  # fmt: skip


@triton.jit
def _skew(
    at, shares, stride, SIZE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The four parts of half the wedges that small_blocks.py leaves, zero within a plane."""
    square: tl.constexpr = PADDED * PADDED
    planes: tl.constexpr = SIZE // 2
    e = tl.arange(0, square)
    j, k = e // PADDED, e % PADDED
    low, high = tl.minimum(j, k), tl.maximum(j, k)
    pair = low * (2 * planes - low - 1) // 2 + high - low - 1
    between = (low != high) & (high < planes)
    below = j > k
    # Entry (r, c) between planes j > k is less entry (c, r) between k and j.
    sign = tl.reshape(tl.where(below, -0.5, 0.5), (PADDED, PADDED))
    at = at + 4 * pair
    a11 = _total(at, between, shares, stride, square, CHUNK)
    a12 = _total(at + tl.where(below, 2, 1), between, shares, stride, square, CHUNK)
    a21 = _total(at + tl.where(below, 1, 2), between, shares, stride, square, CHUNK)
    a22 = _total(at + 3, between, shares, stride, square, CHUNK)
    return (
        sign * tl.reshape(a11, (PADDED, PADDED)), sign * tl.reshape(a12, (PADDED, PADDED)),
        sign * tl.reshape(a21, (PADDED, PADDED)), sign * tl.reshape(a22, (PADDED, PADDED)),
    )  # fmt: skip


@triton.jit
def _with_planes(a12, a21, inside, PADDED: tl.constexpr):
    """What is skew within every plane, put on the diagonals."""
    plane = tl.arange(0, PADDED)
    same = plane[:, None] == plane[None, :]
    return tl.where(same, inside[:, None], a12), tl.where(same, -inside[:, None], a21)


@triton.jit
def _divided(numerator, gap, limit, reach, threshold):
    """numerator / gap, or its limit where the gap is too small for the quotient."""
    tiny = tl.abs(gap) * reach <= threshold
    return tl.where(tiny, limit, numerator / tl.where(tiny, 1.0, gap))


@triton.jit
def _product(a, b, PADDED: tl.constexpr):
    """a @ b in float32, of matrices that may be too small for the units that do it."""
    if PADDED >= 16:
        return tl.dot(a, b, input_precision="ieee")
    else:
        # Along the last axis: along the middle one the compiler sees a product for TF32 in it.
        return tl.sum(a[:, None, :] * tl.trans(b)[None, :, :], axis=2)
