"""From the sums over tokens to the gradients of the angles: one small kernel a layer.

What it computes is said, and done operation by operation, in ops/line.py (``skew_gradient``). Here
a program has one block of one head, as four matrices (PADDED, PADDED): rows and columns that come
first in their planes, and second. On these all of it is elementwise, but for the change of basis.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finish_kernel"]


@triton.jit
def finish_kernel(
    sums, planes, basis, plane_grad, matrix_grad, shares, blocks, threshold,
    AXES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    IS_LINE: tl.constexpr,
):  # fmt: skip
    """``sums`` (shares, H m, what a block has) as rotation_back.py leaves them, to gradients.

    Of a torus: ``plane_grad`` (N, H m, f) of the frequencies, ``matrix_grad`` (H m, b, b) of the
    basis. Of a line: (N, H m) of the direction, (H m, b, b) of the skew matrix, whose frequencies
    are ``planes`` (H m, f).
    """
    block = tl.program_id(0)
    each: tl.constexpr = (
        AXES * (SIZE // 2) + SIZE * SIZE + (SIZE * SIZE + 2 * PADDED if IS_LINE else 0)
    )
    stride = blocks * each
    at = sums + block * each
    plane = tl.arange(0, PADDED)
    real = plane < SIZE // 2
    if IS_LINE:
        w = tl.load(planes + block * (SIZE // 2) + plane, mask=real, other=0.0)
    for axis in tl.static_range(AXES):
        turns = _total(at + axis * (SIZE // 2) + plane, real, shares, stride, PADDED, CHUNK)
        to = axis * blocks + block
        if IS_LINE:
            tl.store(plane_grad + to, tl.sum(turns * w, axis=0))
        else:
            tl.store(plane_grad + to * (SIZE // 2) + plane, turns, mask=real)
    at += AXES * (SIZE // 2)
    a11, a12, a21, a22 = _matrix(at, shares, stride, SIZE, PADDED, CHUNK)
    if IS_LINE:
        at += SIZE * SIZE
        l11, l12, l21, l22 = _matrix(at, shares, stride, SIZE, PADDED, CHUNK)
        at += SIZE * SIZE
        everywhere = plane >= 0
        mass = tl.sum(_total(at + plane, everywhere, shares, stride, PADDED, CHUNK), axis=0)
        at += PADDED
        cubes = tl.sum(_total(at + plane, everywhere, shares, stride, PADDED, CHUNK), axis=0)
        mean = cubes / tl.where(mass > 0, mass, 1.0)
        reach = tl.where(mean > 0, tl.exp2(tl.log2(mean) / 3), mean)
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
        return tl.sum(a[:, :, None] * b[None, :, :], axis=1)
