"""The rotation kernels on plain tensors: how the work is cut, and what is allocated.

Shapes: B batch, H key heads, G queries a key head, T tokens, D channels a head, m blocks a head,
b block size, f = b // 2 planes a block, N axes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comrope.ops.kernels.angle_gradients import finish_kernel
from comrope.ops.kernels.general_blocks import rotate_back_kernel, rotate_kernel
from comrope.ops.kernels.small_blocks import (
    rotate_blocks_back_kernel,
    rotate_blocks_kernel,
    sums_of_a_block,
)

__all__ = [
    "Heads",
    "Turning",
    "empty_angle_gradients",
    "empty_like_order",
    "in_registers",
    "turn",
    "turn_back",
]

# How the work is cut, as benchmarks/tune.py found it best on an H200. Of tiles of channels, rows
# times columns: without a basis and with one, there and back.
TILE, COLUMNS = {"there": 1024, "back": 2048}, {"there": 64, "back": 64}
BASIS_TILE, BASIS_COLUMNS = {"there": 2048, "back": 1024}, {"there": 32, "back": 16}
WARPS, PROGRAMS = 4, {"there": 8, "back": 8}  # programs of every multiprocessor
# Of blocks in threads: few warps, which have no others to wait for, and tiles fetched ahead.
ITEM_WARPS, ITEM_STAGES = {"there": 2, "back": 1}, {"there": 3, "back": 3}
ITEM_PROGRAMS = {"there": 16, "back": 8}
FINISH_WARPS = 1
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


def empty_like_order(x: Tensor) -> Tensor:
    """(B, H, T, D) uninitialised, heads inside tokens in memory if it is so in x."""
    batch, heads, tokens, dim = x.shape
    if x.stride(2) > x.stride(1):
        return x.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return x.new_empty(batch, heads, tokens, dim)


def turn(heads: Heads, turning: Turning, out: Heads) -> None:
    """Write the rotated q and k, and v as it is, to ``out``, which may be ``heads`` itself."""
    tensors = (*_all_three(heads), *_all_three(out))
    if in_registers(heads, turning):
        kernel, (programs, sizes) = rotate_blocks_kernel, _items(heads, turning, "there")
    else:
        kernel, (programs, sizes) = rotate_kernel, _tiles(heads, turning, "there")
    kernel[(programs,)](
        *tensors,
        turning.positions, turning.frequencies, _or(turning.basis, turning.frequencies),
        *map(_strides, tensors), **sizes, FLAT=_flat(tensors), HAS_V=out.v is not None,
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
    is_line = direction is not None
    axes, heads, blocks, _ = turning.frequencies.shape
    skew = in_registers(rotated, turning)
    if skew:
        kernel = rotate_blocks_back_kernel
        programs, sizes = _items(rotated, turning, "back")
        each = _power_of_2(sums_of_a_block(axes, turning.block_size, is_line))
        sizes["EACH"], pulling = each, heads * blocks
    else:
        kernel, (programs, sizes) = rotate_back_kernel, _tiles(rotated, turning, "back")
        each, pulling = _sums_of_a_tile(turning, is_line), programs // sizes["shares"]
        padded = sizes["PADDED"]
        sizes |= {"SIDE": max(16, 2 * padded), "PARTS": max(1, min(WARPS, sizes["ROWS"] // 16))}
        if direction is not None:
            # For every plane, the phantom one of an odd block too, whose channel has a gradient.
            direction = direction[..., None].expand(-1, -1, -1, padded).contiguous()
    rows = rotated.k.shape[0] * rotated.k.shape[2]
    new = turning.frequencies.new_empty
    sums = new((sizes["shares"], heads, blocks, each) if wants_angles else 0)
    pulls = new((pulling, rows, axes) if wants_positions else 0)
    tensors = (*_all_three(rotated)[:2], *_all_three(grads), *_all_three(out))
    kernel[(programs,)](
        *tensors,
        turning.positions, turning.frequencies, _or(turning.basis, turning.frequencies),
        _or(direction, turning.frequencies), sums, pulls,
        *map(_strides, tensors), **sizes, FLAT=_flat(tensors), HAS_V=out.v is not None,
        IS_LINE=is_line, WANTS_SUMS=wants_angles, WANTS_POSITIONS=wants_positions,
    )  # fmt: skip
    pulls = pulls.sum(0) if wants_positions else pulls
    if not wants_angles or turning.basis is None:
        shape = (heads, blocks, axes, -1)
        turns = sums.sum(0).view(shape).permute(2, 0, 1, 3) if wants_angles else sums
        return turns.contiguous(), sums.new_empty(0), pulls
    noise = SUM_NOISE["ieee" if skew else PRECISIONS[rotated.k.dtype]]
    return *_finish(sums, turning, direction, planes, skew, noise), pulls


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


def in_registers(heads: Heads, turning: Turning) -> bool:
    """Whether small_blocks.py serves: a thread holds a block and its basis; a group is unrolled."""
    group = heads.q.shape[1] // heads.k.shape[1]
    return turning.basis is not None and turning.block_size in (4, 8) and group <= 8


def _finish(
    sums: Tensor, turning: Turning, direction: Tensor | None, planes: Tensor | None,
    skew: bool, noise: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of the angles from the sums over tokens (shares, H, m, ...)."""
    shares, heads, blocks, each = sums.shape
    padded = _power_of_2(turning.block_size) // 2
    out = empty_angle_gradients(turning, planes is not None, True)
    finish_kernel[(heads * blocks,)](
        sums, _or(planes, sums), _or(direction, sums), turning.basis, *out,
        shares, heads * blocks, (12 * noise) ** (1 / 3),
        AXES=turning.frequencies.shape[0], SIZE=turning.block_size, PADDED=padded, EACH=each,
        CHUNK=max(1, min(_power_of_2(shares), 1024 // padded**2)),
        IS_LINE=planes is not None, SKEW=skew, num_warps=FINISH_WARPS if padded < 16 else 4,
    )  # fmt: skip
    return out


def _sums_of_a_tile(turning: Turning, is_line: bool) -> int:
    """How many numbers the sums over tokens have for a block: see general_blocks.py."""
    axes, _, _, planes = turning.frequencies.shape
    matrices = (turning.basis is not None) + is_line
    padded = _power_of_2(turning.block_size) // 2
    return axes * planes + matrices * turning.block_size**2 + 2 * padded * is_line


def _tiles(heads: Heads, turning: Turning, way: str) -> tuple[int, dict[str, Any]]:
    """Programs, and sizes, of general_blocks.py."""
    size, blocks = turning.block_size, turning.frequencies.shape[2]
    plain = turning.basis is None
    tile, columns = (TILE[way], COLUMNS[way]) if plain else (BASIS_TILE[way], BASIS_COLUMNS[way])
    padded = _power_of_2(size) // 2
    least = max(1, 8 // padded)  # a product wants 16 channels at the least, a row of memory too
    count = _blocks_together(blocks, columns // (2 * padded), least)
    most = max(16, min(64, tile // (2 * padded * count)))
    rows = max(16, min(most, _power_of_2(heads.k.shape[0] * heads.k.shape[2])))
    programs, sizes = _sizes(heads, turning, PROGRAMS[way], rows, count)
    return programs, sizes | {
        "PADDED": padded,
        "PAIRS": padded * count,
        "FULL": 2 * padded == size and blocks % count == 0,
        "HAS_BASIS": turning.basis is not None,
        "PRECISION": PRECISIONS[heads.k.dtype],
        "num_warps": WARPS,
    }


def _items(heads: Heads, turning: Turning, way: str) -> tuple[int, dict[str, Any]]:
    """Programs, and sizes, of small_blocks.py."""
    blocks = turning.frequencies.shape[2]
    count = _blocks_together(blocks, 8, min(4, _power_of_2(blocks)))
    warps = ITEM_WARPS[way]
    rows = max(1, (128 if heads.k.device.type == "cpu" else 32 * warps) // count)
    programs, sizes = _sizes(heads, turning, ITEM_PROGRAMS[way], rows, count)
    fast = heads.k.dtype != torch.float32 and heads.k.device.type != "cpu"
    more = {"BLOCKS": count, "FAST": fast, "STAGES": ITEM_STAGES[way], "num_warps": warps}
    return programs, sizes | more


def _power_of_2(number: int) -> int:
    """The least that is no less. (Triton's own is slow outside of kernels.)"""
    return 1 << (number - 1).bit_length() if number > 1 else 1


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    # Interpreted on a CPU, few programs that walk through many rows take the least time.
    return 1 if device.type == "cpu" else 132


def _blocks_together(blocks: int, most: int, least: int) -> int:
    """How many blocks of a head a program has: a power of two that divides them, if one can be."""
    count = max(least, min(_power_of_2(blocks), most))
    while count > least and blocks % count:
        count //= 2
    return count


def _sizes(
    heads: Heads, turning: Turning, most: int, rows: int, count: int
) -> tuple[int, dict[str, Any]]:
    """Programs, ``most`` of them a multiprocessor, and the arguments that all kernels take, for
    ``rows`` by ``count`` blocks.
    """
    batch, key_heads, tokens, _ = heads.k.shape
    blocks = turning.frequencies.shape[2]
    units = key_heads * -(-blocks // count)
    programs = most * _multiprocessors(heads.k.device)
    shares = max(1, min(-(-batch * tokens // rows), programs // units))
    return units * shares, {
        "rows": batch * tokens,
        "tokens": tokens,
        "prefix": turning.prefix,
        "position_rows": turning.positions.shape[-2],
        "heads": key_heads,
        "blocks": blocks,
        "shares": shares,
        "GROUP": heads.q.shape[1] // key_heads,
        "AXES": turning.frequencies.shape[0],
        "SIZE": turning.block_size,
        "ROWS": rows,
        "HALVES": turning.halves,
        "PER_SAMPLE": turning.positions.ndim == 3 and turning.positions.shape[0] > 1,
        "num_stages": 1,
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
