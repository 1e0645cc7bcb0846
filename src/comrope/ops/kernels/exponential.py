"""Compute exp(sum_i x_i A_i) of many small skew-symmetric matrices, and its derivative, in float32.

Scaling and squaring: with X = E / 2^s, exp(E) = exp(X)^(2^s), and exp(X) = cosh X + sinh X is one
polynomial in X^2, which is symmetric, and X times another. Every matrix has its own s. A squaring
doubles the deviation from an orthogonal matrix; it is removed after every eighth one, which
ordinary exponents do not reach.

The derivative is taken on the group: with ad E (M) = E M - M E and phi(z) = (e^z - 1) / z,
d exp(E) exp(-E) = phi(ad E) dE. For a gradient G of exp(E), the gradient of E is therefore
phi(-ad E) M, where M is the skew part of G exp(E)^T, the torque. As phi(2z) = phi(z) (1 + e^z) / 2,

    phi(-ad E) = prod_j (1 + Ad(R_j)) / 2  phi(-ad X),  R_j = exp(E / 2^j), j = 1 .. s,

with Ad(R) M = R^T M R. These factors commute, and none of them makes an error larger. (Here the
deviation of R_j from an orthogonal matrix remains, about 1e-7 |E|. Its correction would take 16 %
more time.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from comrope.ops.kernels.arguments import compile_time
from comrope.ops.kernels.small_matrices import (
    GENERAL,
    IN_REGISTERS,
    SKEW,
    SYMMETRIC,
    add,
    add_identity,
    from_upper,
    half_square,
    load,
    multiply,
    scale,
    select,
    split_entries,
    store,
    transpose,
)
from comrope.ops.spectral import sum_over_axes

__all__ = [
    "adjoint_kernel",
    "exponent_gradients",
    "exponential_kernel",
    "free_adjoint",
    "free_rotations",
    "skew_exponential",
]

# Half the sum of squares of a skew matrix bounds the square of each of its frequencies. With
# frequencies below 0.7, the remainder of the Taylor series of exp is 0.7^10 / 10! = 8e-9; the
# argument of phi is then below 1.4, and its remainder is 1.4^12 / 13! = 9e-9.
REACH_SQUARED = tl.constexpr(0.7**2)
PHI_TERMS = tl.constexpr(11)
MATRICES = 32  # of a program, if a thread holds a matrix: one per lane
WARPS = {16: 2, 32: 8}  # by padded size, so that nothing spills; else one


class ExponentialMeta(NamedTuple):
    """The sizes that are known at compile time."""

    AXES: int  # N
    SIZE: int  # b
    P: int  # b, padded to a power of two
    MATRICES: int  # of a program


@triton.jit
def _matrices_of(count, META: tl.constexpr):
    """Return this program's first matrix, its matrices counted from there, and which exist."""
    first = tl.program_id(0) * META.MATRICES
    if META.P <= IN_REGISTERS:
        each = tl.arange(0, META.MATRICES)
    else:
        each = 0
    return first, each, first + each < count


@triton.jit
def _load_exponents(positions, skew, index, inside, blocks, META: tl.constexpr):
    """Return X = E / 2^s for E = sum_i x_i A_i, and s, which is zero where E is not finite."""
    P: tl.constexpr = META.P
    SIZE: tl.constexpr = META.SIZE
    row, block = index // blocks, index % blocks
    total = 0.0
    for axis in tl.static_range(META.AXES):
        x = tl.load(positions + row * META.AXES + axis, mask=inside, other=0.0)
        if P <= IN_REGISTERS:
            x = x[:, None]
        matrix = load(skew, (axis * blocks + block) * (SIZE * SIZE), inside, SIZE, P)
        total += x * matrix
    exponent = from_upper(split_entries(total, P), P)
    square = half_square(exponent, P) / REACH_SQUARED
    # By its exponent bits, the square is below 2^e = 4^(e / 2): ceil(e / 2) halvings.
    halvings = ((square.to(tl.int32, bitcast=True) >> 23) - 125) >> 1
    squarings = tl.where(square < 1e38, tl.maximum(halvings, 0), 0)
    shrink = ((127 - squarings) << 23).to(tl.float32, bitcast=True)
    return scale(shrink, exponent, P), squarings


@triton.jit
def _maximum(squarings, P: tl.constexpr):
    if P <= IN_REGISTERS:
        squarings = tl.max(squarings, 0)
    return squarings


@triton.jit
def _even_powers(x2, x4, c2, c4, c6, c8, P: tl.constexpr):
    """Return 1 + c2 X^2 + c4 X^4 + c6 X^6 + c8 X^8."""
    high = add_identity(add(scale(c6, x2, P), c8, x4, P), c4, P)
    return add_identity(add(multiply(high, x4, SYMMETRIC, 0, P), c2, x2, P), 1.0, P)


@triton.jit
def _taylor(x, P: tl.constexpr):
    """Return exp(X) for a small skew X, up to X^9."""
    x2 = multiply(x, x, SYMMETRIC, 2, P)
    x4 = multiply(x2, x2, SYMMETRIC, 0, P)
    even = _even_powers(x2, x4, 1 / 2, 1 / 24, 1 / 720, 1 / 40320, P)
    odd = _even_powers(x2, x4, 1 / 6, 1 / 120, 1 / 5040, 1 / 362880, P)
    return add(even, 1.0, multiply(x, odd, GENERAL, 1, P), P)


@triton.jit
def _corrected(power, P: tl.constexpr):
    """Return the nearly orthogonal R with less deviation, by a step of Newton's method."""
    excess = multiply(transpose(power, P), power, SYMMETRIC, 0, P)
    return add(power, -0.5, multiply(power, add_identity(excess, -1.0, P), GENERAL, 0, P), P)


@triton.jit
def _phi(x, torque, P: tl.constexpr):
    """Return phi(-ad X) M for a small X, of a skew matrix M, the torque."""
    total = torque
    for term in range(PHI_TERMS):
        product = multiply(x, from_upper(total, P), GENERAL, 2, P)
        bracket = add(transpose(product, P), -1.0, product, P)
        total = add(torque, 1.0 / (PHI_TERMS + 1 - term), bracket, P)
    return total


@triton.jit(do_not_specialize=["count", "blocks"])  # it takes long to compile
def exponential_kernel(positions, skew, out, count, blocks, META: tl.constexpr):
    """Write exp(sum_i x_i A_i) for positions (rows, AXES) and A (AXES, blocks, SIZE, SIZE)."""
    P: tl.constexpr = META.P
    SIZE: tl.constexpr = META.SIZE
    first, each, inside = _matrices_of(count, META)
    x, squarings = _load_exponents(positions, skew, first + each, inside, blocks, META)
    power = _taylor(x, P)
    most = _maximum(squarings, P)
    for first_done in range(0, most, 8):
        for done in range(first_done, tl.minimum(first_done + 8, most)):
            power = select(done < squarings, multiply(power, power, GENERAL, 0, P), power, P)
        if first_done + 8 < most:
            power = select(first_done + 8 < squarings, _corrected(power, P), power, P)
    start = first.to(tl.int64) * (SIZE * SIZE)
    store(out + start, each * (SIZE * SIZE), power, inside, SIZE, P)


@triton.jit(do_not_specialize=["count", "blocks"])
def adjoint_kernel(positions, skew, torques, out, count, blocks, META: tl.constexpr):
    """Write phi(-ad E) M for E = sum_i x_i A_i and M the skew part of the torques."""
    P: tl.constexpr = META.P
    SIZE: tl.constexpr = META.SIZE
    first, each, inside = _matrices_of(count, META)
    start = first.to(tl.int64) * (SIZE * SIZE)
    offset = each * (SIZE * SIZE)
    torque = split_entries(load(torques + start, offset, inside, SIZE, P), P)
    torque = from_upper(scale(0.5, add(torque, -1.0, transpose(torque, P), P), P), P)
    x, squarings = _load_exponents(positions, skew, first + each, inside, blocks, META)
    total = _phi(x, torque, P)
    power = _taylor(x, P)
    for done in range(_maximum(squarings, P)):
        rotated = multiply(from_upper(total, P), power, GENERAL, 1, P)
        rotated = multiply(transpose(power, P), rotated, SKEW, 0, P)
        rotated = scale(0.5, add(rotated, 1.0, total, P), P)
        total = select(done < squarings, rotated, total, P)
        power = select(done < squarings, multiply(power, power, GENERAL, 0, P), power, P)
    store(out + start, offset, from_upper(total, P), inside, SIZE, P)


def _launch(kernel: Any, positions: Tensor, skew: Tensor, *others: Tensor) -> None:
    """Launch for positions (rows, N), skew (N, blocks, b, b), others (rows, blocks, b, b)."""
    (rows, axes), blocks, size = positions.shape, skew.shape[1], skew.shape[-1]
    padded = triton.next_power_of_2(size)
    matrices = MATRICES if padded <= IN_REGISTERS.value else 1
    if rows * blocks == 0:
        return
    meta = ExponentialMeta(AXES=axes, SIZE=size, P=padded, MATRICES=matrices)
    with torch.cuda.device_of(skew):
        kernel[(triton.cdiv(rows * blocks, matrices),)](
            *(tensor.contiguous() for tensor in (positions, skew, *others)),
            rows * blocks, blocks,
            META=compile_time(meta),
            num_warps=WARPS.get(padded, 1), enable_fp_fusion=True,
        )  # fmt: skip


@torch.library.custom_op("comrope::free_rotations", mutates_args=())
def free_rotations(positions: Tensor, skew: Tensor) -> Tensor:
    """Return exp(sum_i x_i A_i) (rows, blocks, b, b) in float32.

    ``positions`` are x (rows, N), ``skew`` A (N, blocks, b, b), skew-symmetric. The gradient of A
    is its skew part.
    """
    out = skew.new_empty(positions.shape[0], *skew.shape[1:])
    _launch(exponential_kernel, positions, skew, out)
    return out


@free_rotations.register_fake
def _(positions, skew):
    return skew.new_empty(positions.shape[0], *skew.shape[1:])


@torch.library.custom_op("comrope::free_adjoint", mutates_args=())
def free_adjoint(positions: Tensor, skew: Tensor, torques: Tensor) -> Tensor:
    """Return the gradient (rows, blocks, b, b) of the exponents sum_i x_i A_i of rotations R.

    ``torques`` are G R^T for the gradient G of R; only their skew part counts.
    """
    out = skew.new_empty(torques.shape)
    _launch(adjoint_kernel, positions, skew, torques, out)
    return out


@free_adjoint.register_fake
def _(positions, skew, torques):
    return skew.new_empty(torques.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _rotations_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    positions, skew, rotations = ctx.saved_tensors
    # G R^T by the columns of R: never in TF32.
    torques = sum_over_axes(grad[..., None, :], rotations.movedim(-1, 0)[..., None, :])
    return exponent_gradients(positions, skew, torques, *ctx.needs_input_grad)


free_rotations.register_autograd(_rotations_backward, setup_context=_keep)


def exponent_gradients(
    positions: Tensor, skew: Tensor, torques: Tensor, of_positions: bool, of_skew: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of positions (rows, N) and matrices (N, blocks, b, b)."""
    if not of_positions and not of_skew:
        return None, None
    gradient = free_adjoint(positions, skew, torques)
    to_positions = to_skew = None
    if of_positions:
        to_positions = torch.stack([(gradient * axis).sum((1, 2, 3)) for axis in skew], dim=-1)
    if of_skew:
        coordinates = positions[..., None, None, None].unbind(1)
        to_skew = torch.stack([(gradient * x).sum(0) for x in coordinates])
    return to_positions, to_skew


def skew_exponential(matrices: Tensor) -> Tensor:
    """Return exp of float32 skew-symmetric matrices (n, b, b), b up to 32."""
    return free_rotations(matrices.new_ones(1, 1), matrices[None])[0]
