"""The spectrum of small skew-symmetric matrices in one launch: a Jacobi iteration over planes.

The columns of an orthogonal Q form f = b / 2 planes. Two planes at a time, Q is rotated until
Q^T S Q has only 2x2 blocks w J, on its diagonal. Restricted to four columns, S is a skew-symmetric
4x4 matrix. Since so(4) = so(3) + so(3), this is two vectors of three dimensions, and it is block
diagonal when both are on their first axis. One quaternion rotates each vector to the nearer end of
that axis. Disjoint pairs of planes are rotated at once. In f - 1 rounds every plane meets every
other (a round-robin tournament): a sweep.

The nearer end keeps the rotations small, which makes convergence quadratic, except for planes of
equal frequency. There a vector vanishes, its direction is noise, and a large rotation undoes what
other pairs have done. It vanishes with the square of what is left off the diagonal, so that damping
of that order keeps its rotation small, and convergence quadratic.

Only Q and S Q are kept, and only columns are combined: the 4x4 matrices m are inner products.

Shapes in the kernel: M matrices per program, b rows, h = b / 4 pairs of planes. Q and S Q are each
a tuple of the four columns of a pair (M, b, h): 0 and 1 are its left plane, 2 and 3 its right one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["skew_spectrum_kernel", "supported"]

# Sweeps end with one that met no 2x2 block off the diagonal above this, relative to the largest
# entry of the matrix; the sweep has made the blocks smaller still.
_TOLERANCE = {torch.float32: 1e-9, torch.float64: 1e-13}
_MAX_SWEEPS = tl.constexpr(40)  # 50,000 matrices of all kinds: 8 at most for b = 8, 15 for 32
_DAMPING = tl.constexpr(1e-3)
_WARPS = {4: 1, 8: 1, 16: 1, 32: 4}  # by size


def supported(block_size: int) -> bool:
    """Return whether the kernel supports this size. (It needs ``gather``: Triton 3.3 or later.)"""
    return block_size in _WARPS and hasattr(tl, "gather")


def skew_spectrum_kernel(skew: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q (..., b, b) and w >= 0 (..., f), descending, with skew = Q diag_k(w_k J) Q^T.

    Q is orthogonal. This is ``comrope.angles.skew_spectrum`` for float32 and float64 matrices of a
    supported size. Computed in float64, exact to 1e-13 of the largest frequency, for float32
    matrices to 1e-9 of it. The host does not wait for the device.
    """
    size = skew.shape[-1]
    if not supported(size) or skew.dtype not in _TOLERANCE:
        raise ValueError(
            f"skew_spectrum_kernel: matrices of size {size} in {skew.dtype}; "
            f"expected one of the sizes {tuple(_WARPS)} in float32 or float64"
        )
    skew = skew.contiguous()
    basis = torch.empty_like(skew)
    frequencies = skew.new_empty(*skew.shape[:-2], size // 2)
    count = skew.numel() // size**2
    # On a GPU one matrix per program is fastest, and no result depends on its neighbours. Triton's
    # interpreter, which runs this on a CPU, takes as long for many as for one.
    matrices = 1 if skew.is_cuda else 64
    if count:
        with torch.cuda.device_of(skew):
            _spectrum[(triton.cdiv(count, matrices),)](
                skew, basis, frequencies, count, _TOLERANCE[skew.dtype] ** 2,
                SIZE=size, MATRICES=matrices, num_warps=_WARPS[size],
                # Fused into a reduction, a product would be rounded in one lane and not in the
                # next. Lanes must agree to the bit on a rotation, or Q does not stay orthogonal.
                enable_fp_fusion=False,
            )  # fmt: skip
    return basis, frequencies


@triton.jit(do_not_specialize=["count"])
def _spectrum(
    skew, basis, frequencies, count, tolerance, SIZE: tl.constexpr, MATRICES: tl.constexpr
):
    """Write the spectrum of skew (count, b, b): basis (count, b, b) and frequencies (count, f)."""
    PAIRS: tl.constexpr = SIZE // 4
    matrix = tl.program_id(0).to(tl.int64) * MATRICES + tl.arange(0, MATRICES)[:, None, None]
    row = tl.arange(0, SIZE)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    live = matrix < count
    start = matrix * (SIZE * SIZE)
    s, finite, scale = _load(skew + start, row, pair, live, SIZE, MATRICES)
    column = 4 * pair + tl.zeros([MATRICES, 1, 1], tl.int32)
    q = (
        (row == column).to(tl.float64), (row == column + 1).to(tl.float64),
        (row == column + 2).to(tl.float64), (row == column + 3).to(tl.float64),
    )  # fmt: skip

    sweeps = 0
    met = tl.zeros([MATRICES, 1, PAIRS], tl.float64)  # the largest block of the last sweep, squared
    while (sweeps == 0) | ((tl.max(met) > tolerance) & (sweeps < _MAX_SWEEPS)):
        # Never 0: a vector of length 0 has a quaternion too.
        damping = _DAMPING * _matrix_max(met, MATRICES) + 1e-18
        met = tl.zeros([MATRICES, 1, PAIRS], tl.float64)
        for _ in range(2 * PAIRS - 1):
            q, s, off = _rotate(q, s, damping)
            met = tl.maximum(met, off)
            if PAIRS > 1:
                q, s = _next_round(q, pair), _next_round(s, pair)
        sweeps += 1

    left, right = _inner_products(q[1], s[0], q[3], s[2])
    q1 = tl.where(left < 0, -q[1], q[1])
    q3 = tl.where(right < 0, -q[3], q[3])
    left, right = tl.abs(left), tl.abs(right)
    least = 1e-13 * _matrix_max(tl.maximum(left, right), MATRICES)
    left = tl.where(left > least, left, 0.0)
    right = tl.where(right > least, right, 0.0)
    basis += start + row * SIZE
    frequencies += matrix * (SIZE // 2)
    place = _ahead(left, 2 * pair, left, 2 * pair) + _ahead(right, 2 * pair + 1, left, 2 * pair)
    _store(basis, frequencies, place, (q[0], q1), left * scale, live, finite)
    place = _ahead(left, 2 * pair, right, 2 * pair + 1)
    place += _ahead(right, 2 * pair + 1, right, 2 * pair + 1)
    _store(basis, frequencies, place, (q[2], q3), right * scale, live, finite)


@triton.jit
def _load(skew, row, pair, live, SIZE: tl.constexpr, MATRICES: tl.constexpr):
    """Return the columns of S, whether a matrix is finite, and its scale.

    The largest entry of a matrix is scaled to 1. A matrix that is not finite becomes 0.
    """
    entries = skew + row * SIZE + 4 * pair
    s0 = tl.load(entries, live, 0.0).to(tl.float64)
    s1 = tl.load(entries + 1, live, 0.0).to(tl.float64)
    s2 = tl.load(entries + 2, live, 0.0).to(tl.float64)
    s3 = tl.load(entries + 3, live, 0.0).to(tl.float64)
    largest = tl.maximum(
        tl.maximum(_magnitude(s0), _magnitude(s1)), tl.maximum(_magnitude(s2), _magnitude(s3))
    )
    largest = _matrix_max(largest, MATRICES)
    finite = largest < float("inf")
    scale = tl.where(finite & (largest > 0), largest, 1.0)
    s0, s1 = tl.where(finite, s0, 0.0) / scale, tl.where(finite, s1, 0.0) / scale
    s2, s3 = tl.where(finite, s2, 0.0) / scale, tl.where(finite, s3, 0.0) / scale
    return (s0, s1, s2, s3), finite, scale


@triton.jit
def _matrix_max(x, MATRICES: tl.constexpr):
    """Return the maximum of each matrix (M, 1, 1); of a single matrix, a scalar."""
    if MATRICES == 1:
        largest = tl.max(x)
    else:
        largest = tl.max(tl.max(x, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return largest


@triton.jit
def _magnitude(x):
    """Return |x|, and infinity for NaN, which a maximum would lose."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _rotate(q, s, damping):
    """Return the columns of Q and S Q after every pair of planes is rotated to block diagonal form.

    With them, the square of what was off the diagonal, to a factor of 2 (M, 1, h).
    """
    m01, m23 = _inner_products(q[0], s[1], q[2], s[3])
    m02, m13 = _inner_products(q[0], s[2], q[1], s[3])
    m03, m12 = _inner_products(q[0], s[3], q[1], s[2])
    c, y, z, off = _rotation_to_axis(m23 + m01, m02 - m13, m03 + m12, damping)
    q, s = _rotated(q, c, y, z, 1.0), _rotated(s, c, y, z, 1.0)
    c, y, z, other = _rotation_to_axis(m23 - m01, m02 + m13, m03 - m12, damping)
    q, s = _rotated(q, c, y, z, -1.0), _rotated(s, c, y, z, -1.0)
    return q, s, tl.maximum(off, other)


@triton.jit
def _inner_products(a, b, c, d):
    """Return a . b and c . d of columns (M, b, h), each (M, 1, h), in one reduction."""
    return tl.split(tl.sum(tl.join(a * b, c * d), axis=1, keep_dims=True))


@triton.jit
def _rotation_to_axis(along, across, upward, damping):
    """Return the unit quaternion that rotates a vector to the nearer end of its first axis.

    It is c + y j + z k. Damping makes the rotation smaller. Returns c, y, z and the square of what
    is off the axis.
    """
    off = across * across + upward * upward
    near = tl.abs(along) + damping
    square = near * near + off
    real = near + square * _rsqrt(square)  # half the rotation ends midway between the directions
    unit = _rsqrt(real * real + off)
    side = tl.where(along < 0, -unit, unit)
    return real * unit, -side * upward, side * across, off


@triton.jit
def _rsqrt(x):
    """Return 1 / sqrt(x) in float64 for x in float32's range, without branches."""
    root = tl.rsqrt(x.to(tl.float32)).to(tl.float64)
    rest = tl.fma(-x, root * root, 1.0)
    return root + root * rest * (0.5 + 0.375 * rest)


@triton.jit
def _rotated(a, c, y, z, hand):
    """Return four columns times the matrix of a quaternion: left (hand 1) or right (-1)."""
    a0, a1, a2, a3 = a
    y1, z1 = hand * y, hand * z
    return (
        tl.fma(z, a3, tl.fma(y, a2, c * a0)),
        tl.fma(-y1, a3, tl.fma(z1, a2, c * a1)),
        tl.fma(-z1, a1, tl.fma(-y, a0, c * a2)),
        tl.fma(y1, a1, tl.fma(-z, a0, c * a3)),
    )


@triton.jit
def _next_round(a, pair):
    """Return the four columns (M, b, h), each moved to its next pair.

    The circle method: the first left plane stays, the others go round it by one place.
    """
    a0, a2 = _next_columns(a[0], a[2], pair)
    a1, a3 = _next_columns(a[1], a[3], pair)
    return a0, a1, a2, a3


@triton.jit
def _next_columns(left, right, pair):
    last = left.shape[2] - 1
    entering = tl.where(pair == 0, right, left)
    index = tl.broadcast_to(tl.maximum(pair - 1, 0), left.shape)
    new_left = tl.where(pair == 0, left, tl.gather(entering, index, 2))
    index = tl.broadcast_to(tl.minimum(pair + 1, last), left.shape)
    return new_left, tl.where(pair == last, left, tl.gather(right, index, 2))


@triton.jit
def _ahead(others, other_place, own, place):
    """Return how many other planes come before each own one (M, 1, h); places decide ties."""
    others = tl.permute(others, (0, 2, 1))
    tie = (others == own) & (tl.permute(other_place, (0, 2, 1)) < place)
    return tl.sum(((others > own) | tie).to(tl.int32), axis=1, keep_dims=True)


@triton.jit
def _store(basis, frequencies, place, plane, values, live, finite):
    """Store planes with their frequencies at their places; NaN for a matrix that is not finite."""
    nan = float("nan")
    tl.store(basis + 2 * place, tl.where(finite, plane[0], nan), live)
    tl.store(basis + 2 * place + 1, tl.where(finite, plane[1], nan), live)
    tl.store(frequencies + place, tl.where(finite, values, nan), live)
