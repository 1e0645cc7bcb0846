"""The gradients of the angles from the sums over tokens: one small kernel per layer.

``skew_gradient`` in ops/collinear.py computes the same, operation by operation. A program has one
block of one head. A (b, b) matrix is four matrices (PADDED, PADDED): a11, a12, a21, a22, where the
first index is 1 for rows that come first in their planes and 2 for the others, and the second index
says the same of columns. On these, everything is elementwise, except the change of basis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["GradientMeta", "SumsOfBlocks", "angle_gradients_kernel"]


class SumsOfBlocks(NamedTuple):
    """What the gradients are computed from."""

    sums: Any  # (shares, H m, EACH), from general_blocks.py or small_blocks.py
    planes: Any  # collinear angles: the frequencies of the skew matrix (H m, f)
    direction: Any  # collinear angles: (N, H m)
    basis: Any  # (H m, b, b)


class GradientMeta(NamedTuple):
    """The values that are known at compile time."""

    AXES: int  # N
    SIZE: int  # b
    PADDED: int  # planes of a block, padded to a power of two
    EACH: int  # sums of a block
    CHUNK: int  # shares that are loaded at a time
    IS_COLLINEAR: bool
    IS_SKEW: bool  # the sums come from small_blocks.py


@triton.jit
def angle_gradients_kernel(given, out, shares, blocks, threshold, META: tl.constexpr):
    """Write the gradients of the angles. ``given`` is a ``SumsOfBlocks``.

    ``out`` is, for commuting angles, the gradients of the frequencies (N, H m, f) and the basis
    (H m, b, b); for collinear angles, those of the direction (N, H m) and the skew matrix
    (H m, b, b). ``shares`` and ``blocks`` (H m) are sizes. Frequencies closer than ``threshold``,
    relative to the scale of the positions, count as equal.
    """
    SIZE: tl.constexpr = META.SIZE
    PADDED: tl.constexpr = META.PADDED
    block = tl.program_id(0)
    stride = blocks * META.EACH
    at = given.sums + block * META.EACH
    plane = tl.arange(0, PADDED)
    real = plane < SIZE // 2
    torque = tl.zeros((PADDED,), dtype=tl.float32)
    if META.IS_COLLINEAR:
        w = tl.load(given.planes + block * (SIZE // 2) + plane, mask=real, other=0.0)
    for axis in tl.static_range(META.AXES):
        turns = _total(at + axis * (SIZE // 2) + plane, real, shares, stride, META)
        to = axis * blocks + block
        if META.IS_COLLINEAR:
            tl.store(out[0] + to, tl.sum(turns * w, axis=0))
            if META.IS_SKEW:
                torque += turns * tl.load(given.direction + to)
        else:
            tl.store(out[0] + to * (SIZE // 2) + plane, turns, mask=real)
    at += META.AXES * (SIZE // 2)
    ENTRIES: tl.constexpr = SIZE * (SIZE - 2) // 2 if META.IS_SKEW else SIZE * SIZE
    WEIGHTS: tl.constexpr = 1 if META.IS_SKEW else triton.next_power_of_2(SIZE) // 2
    if META.IS_SKEW:
        if not META.IS_COLLINEAR:
            torque = _total(at + ENTRIES + plane, real, shares, stride, META)
        a = _skew(at, shares, stride, META)
        if not META.IS_COLLINEAR:
            a = _with_planes(a, -0.5 * torque, PADDED)
    else:
        a = _matrix(at, shares, stride, META)
    if META.IS_COLLINEAR:
        at += ENTRIES
        if META.IS_SKEW:
            l11, l12, l21, l22 = _skew(at, shares, stride, META)
            limit = (0.5 * l11, 0.5 * l12, 0.5 * l21, 0.5 * l22)
            limit = _with_planes(limit, -0.5 * torque, PADDED)
        else:
            limit = _matrix(at, shares, stride, META)
        at += ENTRIES
        held = plane < WEIGHTS
        weight = tl.sum(_total(at + plane, held, shares, stride, META), axis=0)
        at += WEIGHTS
        cubes = tl.sum(_total(at + plane, held, shares, stride, META), axis=0)
        mean = cubes / tl.where(weight > 0, weight, 1.0)
        reach = tl.where(mean > 0, tl.exp2(tl.log2(tl.where(mean > 0, mean, 1.0)) / 3), mean)
        a = _divided_by_gaps(a, w, limit, reach, threshold)
    else:  # the gradient of the basis is Q outer^T
        a = (tl.trans(a[0]), tl.trans(a[2]), tl.trans(a[1]), tl.trans(a[3]))
    _store_matrix(given.basis, out[1], a, block, META)


@triton.jit
def _total(at, mask, shares, stride, META: tl.constexpr):
    """Return the sum over all shares, in their order, of the numbers at ``at``."""
    total = tl.zeros(at.shape, dtype=tl.float32)
    for begin in range(0, shares, META.CHUNK):
        share = begin + tl.arange(0, META.CHUNK)
        part = tl.load(
            at[None, :] + share[:, None] * stride,
            mask=(share < shares)[:, None] & mask[None, :],
            other=0.0,
        )
        total += tl.sum(part, axis=0)
    return total


@triton.jit
def _matrix(at, shares, stride, META: tl.constexpr):
    """Return the sum over all shares of a (b, b). A channel of zeros completes an odd block."""
    SIZE: tl.constexpr = META.SIZE
    PADDED: tl.constexpr = META.PADDED
    e = tl.arange(0, PADDED * PADDED)
    i = 2 * (e // PADDED)
    j = 2 * (e % PADDED)
    at = at + i * SIZE + j
    first_row, first_column = i < SIZE, j < SIZE
    second_row, second_column = i + 1 < SIZE, j + 1 < SIZE
    a11 = _total(at, first_row & first_column, shares, stride, META)
    a12 = _total(at + 1, first_row & second_column, shares, stride, META)
    a21 = _total(at + SIZE, second_row & first_column, shares, stride, META)
    a22 = _total(at + SIZE + 1, second_row & second_column, shares, stride, META)
    return (
        tl.reshape(a11, (PADDED, PADDED)), tl.reshape(a12, (PADDED, PADDED)),
        tl.reshape(a21, (PADDED, PADDED)), tl.reshape(a22, (PADDED, PADDED)),
    )  # fmt: skip


@triton.jit
def _skew(at, shares, stride, META: tl.constexpr):
    """Return half the sum over all shares of wedges (small_blocks.py), zero within a plane."""
    PADDED: tl.constexpr = META.PADDED
    PLANES: tl.constexpr = META.SIZE // 2
    e = tl.arange(0, PADDED * PADDED)
    j, k = e // PADDED, e % PADDED
    low, high = tl.minimum(j, k), tl.maximum(j, k)
    pair = low * (2 * PLANES - low - 1) // 2 + high - low - 1
    between = (low != high) & (high < PLANES)
    below = j > k
    # Entry (r, c) between planes j > k is minus entry (c, r) between k and j.
    sign = tl.reshape(tl.where(below, -0.5, 0.5), (PADDED, PADDED))
    at = at + 4 * pair
    a11 = _total(at, between, shares, stride, META)
    a12 = _total(at + tl.where(below, 2, 1), between, shares, stride, META)
    a21 = _total(at + tl.where(below, 1, 2), between, shares, stride, META)
    a22 = _total(at + 3, between, shares, stride, META)
    return (
        sign * tl.reshape(a11, (PADDED, PADDED)), sign * tl.reshape(a12, (PADDED, PADDED)),
        sign * tl.reshape(a21, (PADDED, PADDED)), sign * tl.reshape(a22, (PADDED, PADDED)),
    )  # fmt: skip


@triton.jit
def _with_planes(a, inside, PADDED: tl.constexpr):
    """Return the matrix with the part that is skew within every plane, on the diagonals."""
    plane = tl.arange(0, PADDED)
    same = plane[:, None] == plane[None, :]
    a12, a21 = tl.where(same, inside[:, None], a[1]), tl.where(same, -inside[:, None], a[2])
    return a[0], a12, a21, a[3]


@triton.jit
def _divided_by_gaps(a, w, limit, reach, threshold):
    """Return the entries of a, multiplied by J from the left, over the gaps of frequencies w.

    The part that commutes with J is divided by the difference of two frequencies, the rest by their
    sum. The product with J is part of the order of the entries.
    """
    a11, a12, a21, a22 = a
    l11, l12, l21, l22 = limit
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
    return a11, a12, a21, a22


@triton.jit
def _divided(numerator, gap, limit, reach, threshold):
    """Return numerator / gap, or its limit where the gap is too small for the quotient."""
    tiny = tl.abs(gap) * reach <= threshold
    return tl.where(tiny, limit, numerator / tl.where(tiny, 1.0, gap))


@triton.jit
def _store_matrix(basis, out, a, block, META: tl.constexpr):
    """Store Q a, or for collinear angles Q a Q^T."""
    SIZE: tl.constexpr = META.SIZE
    PADDED: tl.constexpr = META.PADDED
    a11, a12, a21, a22 = a
    plane = tl.arange(0, PADDED)
    row = tl.arange(0, 2 * PADDED)
    at = block * SIZE * SIZE + row[:, None] * SIZE + 2 * plane[None, :]
    inside = row[:, None] < SIZE
    first = inside & (2 * plane < SIZE)[None, :]
    second = inside & (2 * plane + 1 < SIZE)[None, :]
    q1 = tl.load(basis + at, mask=first, other=0.0)
    q2 = tl.load(basis + at + 1, mask=second, other=0.0)
    left1 = _product(q1, a11, PADDED) + _product(q2, a21, PADDED)
    left2 = _product(q1, a12, PADDED) + _product(q2, a22, PADDED)
    if META.IS_COLLINEAR:
        whole = _product(left1, tl.trans(q1), PADDED) + _product(left2, tl.trans(q2), PADDED)
        at = block * SIZE * SIZE + row[:, None] * SIZE + row[None, :]
        tl.store(out + at, whole, mask=inside & (row < SIZE)[None, :])
    else:
        tl.store(out + at, left1, mask=first)
        tl.store(out + at + 1, left2, mask=second)


@triton.jit
def _product(a, b, PADDED: tl.constexpr):
    """Return a @ b in float32, of matrices that may be too small for ``tl.dot``."""
    if PADDED >= 16:
        return tl.dot(a, b, input_precision="ieee")
    else:
        # Along the last axis: along the middle one, the compiler sees a product for TF32 in it.
        return tl.sum(a[:, None, :] * tl.trans(b)[None, :, :], axis=2)
