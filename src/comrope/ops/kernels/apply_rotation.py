"""Rotating q and k by matrices that are given: y = R x, one matrix a position, head and block.

A program takes one row of the matrices (a position), one key head and as many of its blocks as fit
a tile, as one block-diagonal matrix, and multiplies the vectors of all samples with it. Of the way
back, R being orthogonal, nothing is kept but y: with g its gradient, that of x is R^T g, and the
torque, from which that of the exponent of R comes (see exponential.py), is the sum of g y^T.

Shapes: B batch, H key heads, G queries a key head, T tokens, D channels a head, m blocks a head,
b block size. Rows are the T positions that samples share, or B T of a sample each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from comrope.ops.kernels.exponential import exponent_gradients, free_rotations
from comrope.ops.kernels.launch import empty_like_order

__all__ = ["apply_back_kernel", "apply_free", "apply_free_backward", "apply_kernel", "rotate_free"]

MOST_ROWS = 64
# A wide tile reads whole lines of memory; without tensor cores its zeros cost too much.
MOST_COLUMNS = {torch.float32: 16, torch.float16: 64, torch.bfloat16: 64}


@triton.jit
def _place(tokens, heads, blocks, BLOCKS: tl.constexpr):
    """Of this program: its row, the sample this begins at, token, head and first block."""
    chunks = tl.cdiv(blocks, BLOCKS)
    unit = tl.program_id(0)
    row = unit // (heads * chunks)
    head = unit // chunks % heads
    return row, row // tokens, row % tokens, head, unit % chunks * BLOCKS


@triton.jit
def _diagonal_blocks(first, row, head, heads, blocks, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the (i, j) of a tile's blocks lie in (rows, H, m, b, b), and which of them exist."""
    channel = tl.arange(0, COLUMNS)
    block, entry = channel // SIZE, channel % SIZE
    start = ((row.to(tl.int64) * heads + head) * blocks + first) * (SIZE * SIZE)
    at = block[:, None] * (SIZE * SIZE) + entry[:, None] * SIZE + entry[None, :]
    real = (block < COLUMNS // SIZE) & (first + block < blocks)
    return start, at, (block[:, None] == block[None, :]) & real[:, None]


@triton.jit
def _starts(strides, first, sample, token, head):
    """Where the vectors of the samples begin. Strides: sample, head, token."""
    start = head.to(tl.int64) * strides[1] + token.to(tl.int64) * strides[2]
    return start + (first + sample).to(tl.int64) * strides[0]


@triton.jit
def _channels(
    live, block, blocks, SIZE: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """The channels of a tile, and which of its vectors have them. FULL: all that are live."""
    channel = (block * SIZE + tl.arange(0, COLUMNS))[None, :]
    mask = live[:, None]
    if not FULL:
        own = (tl.arange(0, COLUMNS) < COLUMNS // SIZE * SIZE)[None, :]
        mask = mask & own & (channel < blocks * SIZE)
    return channel, mask


@triton.jit
def _multiply(x, matrix):
    """x matrix in float32. A narrow x meets the matrix in two narrow parts, which hold more of its
    digits than TF32 does and leave every product exact.
    """
    if x.dtype == tl.float32:
        product = tl.dot(x, matrix, input_precision="ieee")
    else:
        high = matrix.to(x.dtype)
        low = (matrix - high.to(tl.float32)).to(x.dtype)
        product = tl.dot(x, high, tl.dot(x, low))
    return product


@triton.jit
def apply_kernel(
    rotations, q, k, q_out, k_out, q_strides, k_strides, q_out_strides, k_out_strides,
    samples, tokens, heads, blocks, group,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """R x, or R^T x if BACK, for q and k. Strides: sample, head, token."""
    row, first, token, head, block = _place(tokens, heads, blocks, COLUMNS // SIZE)
    start, entries, real = _diagonal_blocks(block, row, head, heads, blocks, SIZE, COLUMNS)
    matrix = tl.load(rotations + start + entries, mask=real, other=0.0)
    if not BACK:
        matrix = tl.trans(matrix)
    sample = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = sample < samples
    channel, mask = _channels(live, block, blocks, SIZE, COLUMNS, FULL)
    for member in range(group):
        query = head * group + member
        at = _starts(q_strides, first, sample, token, query)[:, None] + channel
        y = _multiply(tl.load(q + at, mask=mask, other=0.0), matrix)
        at = _starts(q_out_strides, first, sample, token, query)[:, None] + channel
        tl.store(q_out + at, y.to(q_out.dtype.element_ty), mask=mask)
    at = _starts(k_strides, first, sample, token, head)[:, None] + channel
    y = _multiply(tl.load(k + at, mask=mask, other=0.0), matrix)
    at = _starts(k_out_strides, first, sample, token, head)[:, None] + channel
    tl.store(k_out + at, y.to(k_out.dtype.element_ty), mask=mask)


@triton.jit
def _turn_back(
    grad, y, out, grad_strides, y_strides, out_strides, first, sample, token, head,
    channel, mask, matrix, torque,
):  # fmt: skip
    """Writes R^T g, and adds g y^T to the torque."""
    at = _starts(grad_strides, first, sample, token, head)[:, None] + channel
    g = tl.load(grad + at, mask=mask, other=0.0)
    at = _starts(y_strides, first, sample, token, head)[:, None] + channel
    turned = tl.load(y + at, mask=mask, other=0.0)
    at = _starts(out_strides, first, sample, token, head)[:, None] + channel
    tl.store(out + at, _multiply(g, matrix).to(out.dtype.element_ty), mask=mask)
    return tl.dot(tl.trans(g), turned, torque, input_precision="ieee")


@triton.jit
def apply_back_kernel(
    rotations, torques, q_grad, k_grad, q, k, q_out, k_out,
    q_grad_strides, k_grad_strides, q_strides, k_strides, q_out_strides, k_out_strides,
    samples, tokens, heads, blocks, group,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """R^T g for the gradients g of y = R x, and for every matrix the sum of g y^T."""
    row, first, token, head, block = _place(tokens, heads, blocks, COLUMNS // SIZE)
    start, entries, real = _diagonal_blocks(block, row, head, heads, blocks, SIZE, COLUMNS)
    matrix = tl.load(rotations + start + entries, mask=real, other=0.0)
    torque = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    for begin in range(0, samples, ROWS):
        sample = begin + tl.arange(0, ROWS)
        channel, mask = _channels(sample < samples, block, blocks, SIZE, COLUMNS, FULL)
        for member in range(group):
            torque = _turn_back(
                q_grad, q, q_out, q_grad_strides, q_strides, q_out_strides,
                first, sample, token, head * group + member, channel, mask, matrix, torque,
            )  # fmt: skip
        torque = _turn_back(
            k_grad, k, k_out, k_grad_strides, k_strides, k_out_strides,
            first, sample, token, head, channel, mask, matrix, torque,
        )  # fmt: skip
    tl.store(torques + start + entries, torque, mask=real)


def _cut(q: Tensor, k: Tensor, rotations: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Programs along the matrices, programs along the samples, and what a kernel is told."""
    batch, heads, tokens, dim = k.shape
    size, blocks = rotations.shape[-1], rotations.shape[1] // heads
    samples = batch if rotations.shape[0] == tokens else 1
    rows = max(16, min(MOST_ROWS, triton.next_power_of_2(samples)))
    columns = triton.next_power_of_2(max(16, size))
    while 2 * columns <= min(rows, MOST_COLUMNS[k.dtype]) and dim % (2 * columns) == 0:
        columns *= 2
    units = rotations.shape[0] * heads * triton.cdiv(blocks, columns // size)
    return units, triton.cdiv(samples, rows), {
        "samples": samples, "tokens": tokens, "heads": heads, "blocks": blocks,
        "group": q.shape[1] // heads,
        "SIZE": size, "COLUMNS": columns, "ROWS": rows,
        "FULL": columns % size == 0 and dim % columns == 0,
        "num_warps": rows // 16, "num_stages": 1, "enable_fp_fusion": True,
    }  # fmt: skip


def _with_strides(*tensors: Tensor) -> tuple[Any, ...]:
    """The tensors, and their strides of sample, head and token."""
    return *tensors, *(tensor.stride()[:3] for tensor in tensors)


def _together(x: Tensor) -> Tensor:
    """x with the channels of a token together."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("comrope::apply_free", mutates_args=())
def apply_free(q: Tensor, k: Tensor, rotations: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """R x, or R^T x if ``back``, for q (B, H G, T, D), k (B, H, T, D), R (T or B T, H m, b, b)."""
    out = empty_like_order(q), empty_like_order(k)
    units, shares, options = _cut(q, k, rotations)
    if k.numel():
        with torch.cuda.device_of(q):
            apply_kernel[units, shares](
                rotations.contiguous(), *_with_strides(_together(q), _together(k), *out),
                BACK=back, **options,
            )  # fmt: skip
    return out


@apply_free.register_fake
def _(q, k, rotations, back):
    return empty_like_order(q), empty_like_order(k)


@torch.library.custom_op("comrope::apply_free_backward", mutates_args=())
def apply_free_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, rotations: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradients of q and k, which are rotated: those before, and the torques of R."""
    out, torques = (empty_like_order(q), empty_like_order(k)), rotations.new_empty(rotations.shape)
    units, _, options = _cut(q, k, rotations)
    if k.numel():
        tensors = _with_strides(*map(_together, (q_grad, k_grad, q, k)), *out)
        with torch.cuda.device_of(q):
            apply_back_kernel[(units,)](rotations.contiguous(), torques, *tensors, **options)
    else:
        torques.zero_()
    return *out, torques


@apply_free_backward.register_fake
def _(q_grad, k_grad, q, k, rotations):
    return empty_like_order(q), empty_like_order(k), rotations.new_empty(rotations.shape)


@torch.library.custom_op("comrope::rotate_free", mutates_args=())
def _rotate_free(
    q: Tensor, k: Tensor, positions: Tensor, skew: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``rotate_free``, and the matrices (T or B T, H m, b, b)."""
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
    # With a matrix a sample they would outweigh all that is kept, and are computed once more.
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
    """R(x) q and R(x) k for R(x) = exp(sum_i x_i A_i), whose A (N, H, m, b, b) need not commute.

    q (B, H G, T, D), k (B, H, T, D) of any order in memory, and x (T, N) or (B, T, N). x and A are
    float32, and A is skew-symmetric; so is its gradient.
    """
    return _rotate_free(q, k, positions, skew)[:2]
