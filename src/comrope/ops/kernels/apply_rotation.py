"""Rotate q and k by given matrices: y = R x, one matrix per position, head and block.

A program has one row of the matrices (a position), one key head and as many of its blocks as fit a
tile, as one block-diagonal matrix. It multiplies the vectors of all samples with it. R is
orthogonal, so the backward pass needs only y: with g its gradient, that of x is R^T g, and the sum
of g y^T is the torque, from which exponential.py computes the gradient of the exponent of R.

Shapes: B batch, H key heads, G queries per key head, T tokens, D channels per head, m blocks per
head, b block size. Rows are the T positions that samples share, or B T if each has its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from comrope.ops.kernels.arguments import Heads, compile_time
from comrope.ops.kernels.exponential import exponent_gradients, free_rotations
from comrope.ops.kernels.launch import empty_like_order

__all__ = [
    "apply_backward_kernel",
    "apply_free",
    "apply_free_backward",
    "apply_kernel",
    "rotate_free",
]

MOST_ROWS = 64
# A wide tile reads whole lines of memory; without tensor cores its zeros cost too much.
MOST_COLUMNS = {torch.float32: 16, torch.float16: 64, torch.bfloat16: 64}


class ApplyTensors(NamedTuple):
    """The tensors of a launch. A second instance holds their strides: sample, head, token."""

    x: Heads  # to be multiplied
    y: Heads | None  # backward: the rotated q and k
    out: Heads


class ApplyWork(NamedTuple):
    """The sizes that are known at run time."""

    samples: Any  # that share a matrix
    tokens: Any  # T
    heads: Any  # H
    blocks: Any  # m
    group: Any  # G


class ApplyMeta(NamedTuple):
    """The sizes that are known at compile time."""

    SIZE: int  # b
    COLUMNS: int  # channels of a tile, with padding
    ROWS: int  # samples of a tile
    FULL: bool  # there is no padding
    INVERSE: bool  # multiply by R^T


class Tile(NamedTuple):
    """What a program multiplies at a time: some samples of a token, and blocks of a head."""

    first: Any  # the sample that the position belongs to; 0 if samples share it
    sample: Any  # counted from there
    token: Any
    channel: Any
    mask: Any


@triton.jit
def _position(work, META: tl.constexpr):
    """Return the row of this program, its first sample, token, head and first block."""
    BLOCKS: tl.constexpr = META.COLUMNS // META.SIZE
    chunks = tl.cdiv(work.blocks, BLOCKS)
    unit = tl.program_id(0)
    row = unit // (work.heads * chunks)
    head = unit // chunks % work.heads
    return row, row // work.tokens, row % work.tokens, head, unit % chunks * BLOCKS


@triton.jit
def _diagonal_blocks(first, row, head, work, META: tl.constexpr):
    """Return where a tile's blocks are in (rows, H, m, b, b), and which of their entries exist."""
    SIZE: tl.constexpr = META.SIZE
    channel = tl.arange(0, META.COLUMNS)
    block, entry = channel // SIZE, channel % SIZE
    start = ((row.to(tl.int64) * work.heads + head) * work.blocks + first) * (SIZE * SIZE)
    at = block[:, None] * (SIZE * SIZE) + entry[:, None] * SIZE + entry[None, :]
    real = (block < META.COLUMNS // SIZE) & (first + block < work.blocks)
    return start, at, (block[:, None] == block[None, :]) & real[:, None]


@triton.jit
def _tile(first, sample, token, block, work, META: tl.constexpr):
    """Return the tile of these samples, and which of its channels exist."""
    live = sample < work.samples
    channel = (block * META.SIZE + tl.arange(0, META.COLUMNS))[None, :]
    mask = live[:, None]
    if not META.FULL:
        own = (tl.arange(0, META.COLUMNS) < META.COLUMNS // META.SIZE * META.SIZE)[None, :]
        mask = mask & own & (channel < work.blocks * META.SIZE)
    return Tile(first, sample, token, channel, mask)


@triton.jit
def _offsets(strides, head, tile):
    """Return where the channels of the samples are."""
    start = head.to(tl.int64) * strides[1] + tile.token.to(tl.int64) * strides[2]
    start = start + (tile.first + tile.sample).to(tl.int64) * strides[0]
    return start[:, None] + tile.channel


@triton.jit
def _multiply(x, matrix):
    """Return x matrix in float32.

    For 16-bit x, the matrix is split into two 16-bit parts, which hold more of its digits than TF32
    and leave every product exact.
    """
    if x.dtype == tl.float32:
        product = tl.dot(x, matrix, input_precision="ieee")
    else:
        high = matrix.to(x.dtype)
        low = (matrix - high.to(tl.float32)).to(x.dtype)
        product = tl.dot(x, high, tl.dot(x, low))
    return product


@triton.jit
def apply_kernel(rotations, tensors, strides, work, META: tl.constexpr):
    """Write R x, or R^T x if INVERSE, for q and k."""
    row, first, token, head, block = _position(work, META)
    start, entries, real = _diagonal_blocks(block, row, head, work, META)
    matrix = tl.load(rotations + start + entries, mask=real, other=0.0)
    if not META.INVERSE:
        matrix = tl.trans(matrix)
    sample = tl.program_id(1) * META.ROWS + tl.arange(0, META.ROWS)
    tile = _tile(first, sample, token, block, work, META)
    x, out = tensors.x, tensors.out
    for member in range(work.group):
        query = head * work.group + member
        _apply((x.q, out.q), (strides.x.q, strides.out.q), query, tile, matrix)
    _apply((x.k, out.k), (strides.x.k, strides.out.k), head, tile, matrix)


@triton.jit
def _apply(pointers, strides, head, tile, matrix):
    """Write x matrix. Pointers and strides: of x and out."""
    x, out = pointers
    y = _multiply(tl.load(x + _offsets(strides[0], head, tile), mask=tile.mask, other=0.0), matrix)
    at = _offsets(strides[1], head, tile)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=tile.mask)


@triton.jit
def apply_backward_kernel(rotations, torques, tensors, strides, work, META: tl.constexpr):
    """Write R^T g for the gradients g of y = R x, and for every matrix the sum of g y^T."""
    row, first, token, head, block = _position(work, META)
    start, entries, real = _diagonal_blocks(block, row, head, work, META)
    matrix = tl.load(rotations + start + entries, mask=real, other=0.0)
    torque = tl.zeros((META.COLUMNS, META.COLUMNS), tl.float32)
    grads, y, out = tensors
    for begin in range(0, work.samples, META.ROWS):
        sample = begin + tl.arange(0, META.ROWS)
        tile = _tile(first, sample, token, block, work, META)
        for member in range(work.group):
            query = head * work.group + member
            to = (strides.x.q, strides.y.q, strides.out.q)
            torque = _apply_back((grads.q, y.q, out.q), to, query, tile, matrix, torque)
        to = (strides.x.k, strides.y.k, strides.out.k)
        torque = _apply_back((grads.k, y.k, out.k), to, head, tile, matrix, torque)
    tl.store(torques + start + entries, torque, mask=real)


@triton.jit
def _apply_back(pointers, strides, head, tile, matrix, torque):
    """Write R^T g, and return torque + g y^T. Pointers and strides: of g, y and out."""
    grad, y, out = pointers
    g = tl.load(grad + _offsets(strides[0], head, tile), mask=tile.mask, other=0.0)
    y = tl.load(y + _offsets(strides[1], head, tile), mask=tile.mask, other=0.0)
    at = _offsets(strides[2], head, tile)
    tl.store(out + at, _multiply(g, matrix).to(out.dtype.element_ty), mask=tile.mask)
    return tl.dot(tl.trans(g), y, torque, input_precision="ieee")


def _divide(
    q: Tensor, k: Tensor, rotations: Tensor, inverse: bool = False
) -> tuple[int, int, ApplyWork, ApplyMeta, dict[str, Any]]:
    """Return programs along the matrices and along the samples, and arguments of the kernel."""
    batch, heads, tokens, dim = k.shape
    size, blocks = rotations.shape[-1], rotations.shape[1] // heads
    samples = batch if rotations.shape[0] == tokens else 1
    rows = max(16, min(MOST_ROWS, triton.next_power_of_2(samples)))
    columns = triton.next_power_of_2(max(16, size))
    while 2 * columns <= min(rows, MOST_COLUMNS[k.dtype]) and dim % (2 * columns) == 0:
        columns *= 2
    units = rotations.shape[0] * heads * triton.cdiv(blocks, columns // size)
    work = ApplyWork(samples, tokens, heads, blocks, q.shape[1] // heads)
    full = columns % size == 0 and dim % columns == 0
    meta = ApplyMeta(SIZE=size, COLUMNS=columns, ROWS=rows, FULL=full, INVERSE=inverse)
    options = {"num_warps": rows // 16, "num_stages": 1, "enable_fp_fusion": True}
    return units, triton.cdiv(samples, rows), work, meta, options


def _strides(tensors: ApplyTensors) -> ApplyTensors:
    """Return the strides of sample, head and token."""
    strides = [heads and Heads(heads.q.stride()[:3], heads.k.stride()[:3]) for heads in tensors]
    return ApplyTensors(*strides)  # type: ignore[arg-type]


def _contiguous_channels(q: Tensor, k: Tensor) -> Heads:
    """Return both with the channels of a token contiguous."""
    return Heads(*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k)))


@torch.library.custom_op("comrope::apply_free", mutates_args=())
def apply_free(q: Tensor, k: Tensor, rotations: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Return R x, or R^T x if ``back``, for q and k.

    q is (B, H G, T, D), k (B, H, T, D) and R (T or B T, H m, b, b).
    """
    tensors = ApplyTensors(
        _contiguous_channels(q, k), None, Heads(empty_like_order(q), empty_like_order(k))
    )
    units, shares, work, meta, options = _divide(q, k, rotations, back)
    if k.numel():
        with torch.cuda.device_of(q):
            apply_kernel[units, shares](
                rotations.contiguous(),
                tensors,
                _strides(tensors),
                work,
                META=compile_time(meta),
                **options,
            )
    return tensors.out.q, tensors.out.k


@apply_free.register_fake
def _(q, k, rotations, back):
    return empty_like_order(q), empty_like_order(k)


@torch.library.custom_op("comrope::apply_free_backward", mutates_args=())
def apply_free_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, rotations: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients before the rotation, and the torques of R, from rotated q and k."""
    tensors = ApplyTensors(
        _contiguous_channels(q_grad, k_grad), _contiguous_channels(q, k),
        Heads(empty_like_order(q), empty_like_order(k)),
    )  # fmt: skip
    torques = rotations.new_empty(rotations.shape)
    units, _, work, meta, options = _divide(q, k, rotations)
    if k.numel():
        with torch.cuda.device_of(q):
            apply_backward_kernel[(units,)](
                rotations.contiguous(), torques, tensors, _strides(tensors), work,
                META=compile_time(meta), **options,
            )  # fmt: skip
    else:
        torques.zero_()
    return tensors.out.q, tensors.out.k, torques


@apply_free_backward.register_fake
def _(q_grad, k_grad, q, k, rotations):
    return empty_like_order(q), empty_like_order(k), rotations.new_empty(rotations.shape)


@torch.library.custom_op("comrope::rotate_free", mutates_args=())
def _rotate_free(
    q: Tensor, k: Tensor, positions: Tensor, skew: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``rotate_free`` does, and the matrices (T or B T, H m, b, b)."""
    rotations = free_rotations(positions.flatten(0, -2), skew.flatten(1, 2))
    return *apply_free(q, k, rotations, False), rotations


@_rotate_free.register_fake
def _(q, k, positions, skew):
    rotations = free_rotations(positions.flatten(0, -2), skew.flatten(1, 2))
    return empty_like_order(q), empty_like_order(k), rotations


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, _, positions, skew = inputs
    q, k, rotations = output
    ctx.mark_non_differentiable(rotations)
    ctx.set_materialize_grads(False)
    shared = rotations.shape[0] == q.shape[2]
    # Matrices of every sample would need more memory than all else; they are computed again.
    ctx.save_for_backward(q, k, positions, skew, rotations if shared else None)


def _rotate_free_backward(
    ctx: Any, q_grad: Tensor | None, k_grad: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    q, k, positions, skew, rotations = ctx.saved_tensors
    flat = positions.flatten(0, -2), skew.flatten(1, 2)
    rotations = free_rotations(*flat) if rotations is None else rotations
    q_grad = torch.zeros_like(q) if q_grad is None else q_grad
    k_grad = torch.zeros_like(k) if k_grad is None else k_grad
    if not any(ctx.needs_input_grad[2:]):
        return *apply_free(q_grad, k_grad, rotations, True), None, None
    q_grad, k_grad, torques = apply_free_backward(q_grad, k_grad, q, k, rotations)
    to_positions, to_skew = exponent_gradients(*flat, torques, *ctx.needs_input_grad[2:])
    to_positions = None if to_positions is None else to_positions.view(positions.shape)
    return q_grad, k_grad, to_positions, None if to_skew is None else to_skew.view(skew.shape)


_rotate_free.register_autograd(_rotate_free_backward, setup_context=_keep)


def rotate_free(q: Tensor, k: Tensor, positions: Tensor, skew: Tensor) -> tuple[Tensor, Tensor]:
    """Return R(x) q and R(x) k for R(x) = exp(sum_i x_i A_i), whose A need not commute.

    Args:
        q: (B, H G, T, D), of any strides.
        k: (B, H, T, D), of any strides.
        positions: x (T, N) or (B, T, N), float32.
        skew: A (N, H, m, b, b), skew-symmetric and float32. So is its gradient.
    """
    return _rotate_free(q, k, positions, skew)[:2]
