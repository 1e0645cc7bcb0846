"""The rotation kernels on plain tensors: how the work is cut, and what is allocated.

Shapes: B batch, H key heads, G queries a key head, T tokens, D channels a head, m blocks a head,
b block size, f = b // 2 planes a block, N axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from comrope.ops.kernels.finish import finish_kernel
from comrope.ops.kernels.rotation import rotate_kernel
from comrope.ops.kernels.rotation_back import rotate_back_kernel

__all__ = [
    "Heads",
    "Turning",
    "empty_angle_gradients",
    "empty_like_order",
    "turn",
    "turn_back",
]

TILE = 2048  # channels of a tile, rows times columns
COLUMNS_WITH_BASIS, COLUMNS = 32, 64
COLUMNS_OF_LINE = 16  # on the way back, where a line has most to hold in registers
WARPS, STAGES = 4, 1
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 4096, 1024
# Of products: TF32 keeps as many bits as float16 inputs and outputs have, and more than bfloat16.
PRECISIONS = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}
# What sums over tokens are good to then, of the sum of their sizes: roundings are many, and random.
SUM_NOISE = {"ieee": 1.2e-7, "tf32": 1.2e-6, "bf16": 1e-3}


class Heads(NamedTuple):
    """Queries (B, H G, T, D), keys (B, H, T, D) and, where they travel along, values (B, H, T, D).

    Of any strides, but the channels of a token lie together.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None = None


class Turning(NamedTuple):
    """What turns them, all of it float32 and contiguous."""

    positions: Tensor  # (T', N) or (B, T', N), T' = T or T less the prefix tokens
    frequencies: Tensor  # (N, H, m, f)
    basis: Tensor | None  # (H, m, b, b)
    block_size: int
    prefix: int
    halves: bool


class Cut(NamedTuple):
    """How the work is shared out."""

    padded: int  # planes of a block, phantom ones with them
    pairs: int  # planes of a tile
    rows: int
    full: bool
    units: int
    shares: int


def empty_like_order(x: Tensor) -> Tensor:
    """(B, H, T, D) uninitialised, heads inside tokens in memory if it is so in x."""
    batch, heads, tokens, dim = x.shape
    if x.stride(2) > x.stride(1):
        return x.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return x.new_empty(batch, heads, tokens, dim)


def turn(heads: Heads, turning: Turning, out: Heads) -> None:
    """Write the rotated q and k, and v as it is, to ``out``, which may be ``heads`` itself."""
    cut = _cut(heads, turning, FORWARD_PROGRAMS)
    tensors = (*_all_three(heads), *_all_three(out))
    rotate_kernel[(cut.units * cut.shares,)](
        *tensors,
        turning.positions, turning.frequencies, _or(turning.basis, turning.frequencies),
        *map(_strides, tensors),
        **_sizes(heads, turning, cut), FLAT=_flat(tensors), HAS_V=out.v is not None,
    )  # fmt: skip


def turn_back(
    rotated: Heads, grads: Heads, turning: Turning, out: Heads,
    *, direction: Tensor | None, planes: Tensor | None, wants_angles: bool, wants_positions: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Write the gradients before the rotation to ``out``.

    Returns the gradients of the angles, two tensors as ``empty_angle_gradients`` has them, and that
    of the position of every row (B T, N), empty if not wanted. A line has ``direction`` (N, H, m)
    and the frequencies of its matrix, ``planes`` (H, m, f).
    """
    cut = _cut(rotated, turning, BACKWARD_PROGRAMS, COLUMNS_OF_LINE if direction is not None else 0)
    axes, heads, blocks, _ = turning.frequencies.shape
    rows = rotated.k.shape[0] * rotated.k.shape[2]
    each = _sums_of_a_block(turning, direction is not None)
    sums = turning.frequencies.new_empty((cut.shares, heads, blocks, each) if wants_angles else 0)
    pulls = turning.frequencies.new_empty((cut.units, rows, axes) if wants_positions else 0)
    if direction is not None:
        # For every plane, the phantom one of an odd block too, whose channel has a gradient.
        direction = direction[..., None].expand(-1, -1, -1, cut.padded).contiguous()
    tensors = (*_all_three(rotated)[:2], *_all_three(grads), *_all_three(out))
    rotate_back_kernel[(cut.units * cut.shares,)](
        *tensors,
        turning.positions, turning.frequencies, _or(turning.basis, turning.frequencies),
        _or(direction, turning.frequencies), sums, pulls,
        *map(_strides, tensors),
        **_sizes(rotated, turning, cut), FLAT=_flat(tensors), HAS_V=out.v is not None,
        IS_LINE=direction is not None, WANTS_SUMS=wants_angles, WANTS_POSITIONS=wants_positions,
        SIDE=max(16, 2 * cut.padded), PARTS=max(1, min(WARPS, cut.rows // 16)),
    )  # fmt: skip
    pulls = pulls.sum(0) if wants_positions else pulls
    if not wants_angles or turning.basis is None:
        shape = (heads, blocks, axes, -1)
        turns = sums.sum(0).view(shape).permute(2, 0, 1, 3) if wants_angles else sums
        return turns.contiguous(), sums.new_empty(0), pulls
    return *_finish(sums, turning, planes, PRECISIONS[rotated.k.dtype]), pulls


def empty_angle_gradients(
    turning: Turning, is_line: bool, wants_angles: bool
) -> tuple[Tensor, Tensor]:
    """Of a torus those of its frequencies (N, H, m, f) and basis (H, m, b, b), of a line those of
    its direction (N, H, m) and matrix (H, m, b, b); empty where there is none, or none wanted.
    """
    new, shape = turning.frequencies.new_empty, turning.frequencies.shape
    if not wants_angles:
        return new(0), new(0)
    first = new(shape[:3] if is_line else shape)
    return first, new(0) if turning.basis is None else new(turning.basis.shape)


def _finish(
    sums: Tensor, turning: Turning, planes: Tensor | None, precision: str
) -> tuple[Tensor, Tensor]:
    """The gradients of the angles from the sums over tokens (shares, H, m, ...)."""
    shares, heads, blocks, _ = sums.shape
    padded = triton.next_power_of_2(turning.block_size) // 2
    out = empty_angle_gradients(turning, planes is not None, True)
    finish_kernel[(heads * blocks,)](
        sums, _or(planes, sums), turning.basis, *out, shares, heads * blocks,
        (12 * SUM_NOISE[precision]) ** (1 / 3),
        AXES=turning.frequencies.shape[0], SIZE=turning.block_size, PADDED=padded,
        CHUNK=max(1, min(triton.next_power_of_2(shares), 2048 // padded**2)),
        IS_LINE=planes is not None, num_warps=4,
    )  # fmt: skip
    return out


def _sums_of_a_block(turning: Turning, is_line: bool) -> int:
    """How many numbers the sums over tokens have for a block: see rotation_back.py."""
    axes, _, _, planes = turning.frequencies.shape
    matrices = (turning.basis is not None) + is_line
    padded = triton.next_power_of_2(turning.block_size) // 2
    return axes * planes + matrices * turning.block_size**2 + 2 * padded * is_line


def _cut(heads: Heads, turning: Turning, programs: int, columns: int = 0) -> Cut:
    size, blocks = turning.block_size, turning.frequencies.shape[2]
    columns = columns or (COLUMNS if turning.basis is None else COLUMNS_WITH_BASIS)
    padded = triton.next_power_of_2(size) // 2
    least = max(1, 8 // padded)  # a product wants 16 channels at the least, a row of memory too
    count = max(least, min(triton.next_power_of_2(blocks), columns // (2 * padded)))
    while count > least and blocks % count:
        count //= 2
    tokens = heads.k.shape[0] * heads.k.shape[2]
    most = max(16, min(64, TILE // (2 * padded * count)))
    rows = max(16, min(most, triton.next_power_of_2(tokens)))
    units = heads.k.shape[1] * -(-blocks // count)
    return Cut(
        padded=padded,
        pairs=padded * count,
        rows=rows,
        full=2 * padded == size and blocks % count == 0,
        units=units,
        shares=max(1, min(-(-tokens // rows), programs // units)),
    )


def _sizes(heads: Heads, turning: Turning, cut: Cut) -> dict[str, Any]:
    """The arguments that both kernels take."""
    batch, key_heads, tokens, _ = heads.k.shape
    return {
        "rows": batch * tokens,
        "tokens": tokens,
        "prefix": turning.prefix,
        "position_rows": turning.positions.shape[-2],
        "heads": key_heads,
        "blocks": turning.frequencies.shape[2],
        "shares": cut.shares,
        "GROUP": heads.q.shape[1] // key_heads,
        "AXES": turning.frequencies.shape[0],
        "SIZE": turning.block_size,
        "PADDED": cut.padded,
        "PAIRS": cut.pairs,
        "ROWS": cut.rows,
        "FULL": cut.full,
        "HALVES": turning.halves,
        "PER_SAMPLE": turning.positions.ndim == 3 and turning.positions.shape[0] > 1,
        "HAS_BASIS": turning.basis is not None,
        "PRECISION": PRECISIONS[heads.k.dtype],
        "num_warps": WARPS,
        "num_stages": STAGES,
        "enable_fp_fusion": True,  # Triton 3.10 will not by default
    }


def _all_three(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the channels of a token together. A kernel has no optional pointers: where
    there is no v, k stands in and is left alone.
    """
    q, k, v = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in heads)
    return q, k, k if v is None else v  # type: ignore[return-value]


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _flat(tensors: tuple[Tensor, ...]) -> bool:
    """Whether in all of them samples follow each other as tokens do."""
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2) for x in tensors)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x
