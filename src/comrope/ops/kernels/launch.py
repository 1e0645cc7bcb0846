"""Launch the rotation kernels on plain tensors: how the work is divided, and what is allocated.

Shapes: B batch, H key heads, G queries per key head, T tokens, D channels per head, m blocks per
head, b block size, f = b // 2 planes per block, N axes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comrope.ops.kernels.angle_gradients import GradientMeta, SumsOfBlocks, angle_gradients_kernel
from comrope.ops.kernels.arguments import (
    AngleArgs,
    Heads,
    Meta,
    Sums,
    Tensors,
    Work,
    compile_time,
)
from comrope.ops.kernels.general_blocks import rotate_backward_kernel, rotate_kernel
from comrope.ops.kernels.small_blocks import (
    rotate_blocks_backward_kernel,
    rotate_blocks_kernel,
    sums_of_a_block,
)

__all__ = [
    "Heads",
    "RotationArgs",
    "Tuning",
    "empty_angle_gradients",
    "empty_like_order",
    "in_registers",
    "launch_backward",
    "launch_forward",
]


class Tuning(NamedTuple):
    """How the work of a kernel is divided."""

    warps: int
    programs: int  # of every multiprocessor
    tile: int = 0  # general blocks: channels of a tile, at most
    columns: int = 0  # general blocks: channels of a row of it, at most
    stages: int = 1  # small blocks: tiles that are loaded ahead


# What benchmarks/tune.py found best on an H200. Small blocks take few warps, which have no others
# to wait for.
TUNED = {
    ("no basis", "forward"): Tuning(warps=4, programs=8, tile=1024, columns=64),
    ("no basis", "backward"): Tuning(warps=4, programs=8, tile=2048, columns=64),
    ("basis", "forward"): Tuning(warps=4, programs=8, tile=2048, columns=32),
    ("basis", "backward"): Tuning(warps=4, programs=8, tile=1024, columns=16),
    ("small blocks", "forward"): Tuning(warps=2, programs=16, stages=3),
    ("small blocks", "backward"): Tuning(warps=1, programs=8, stages=3),
}
# Of products: TF32 keeps as many bits as float16 inputs and outputs have, and more than bfloat16.
PRECISIONS = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}
# The relative error of sums over tokens: roundings are many, and random.
SUM_NOISE = {"ieee": 1.2e-7, "tf32": 1.2e-6, "bf16": 1e-3}


class RotationArgs(NamedTuple):
    """The rotation: tensors are float32 and contiguous."""

    positions: Tensor  # (T', N) or (B, T', N), T' is T, or T without the prefix tokens
    frequencies: Tensor  # (N, H, m, f)
    basis: Tensor | None  # (H, m, b, b)
    block_size: int
    prefix: int
    halves: bool


def empty_like_order(x: Tensor) -> Tensor:
    """Return an uninitialised (B, H, T, D), with heads inside tokens in memory if x has them so."""
    batch, heads, tokens, dim = x.shape
    if x.stride(2) > x.stride(1):
        return x.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return x.new_empty(batch, heads, tokens, dim)


def launch_forward(heads: Heads, args: RotationArgs, out: Heads) -> None:
    """Write the rotated q and k, and v unchanged, to ``out``, which may be ``heads`` itself."""
    tensors = Tensors(_with_stand_in(heads), None, _with_stand_in(out))
    if in_registers(heads, args):
        kernel, divide = rotate_blocks_kernel, _divide_small
    else:
        kernel, divide = rotate_kernel, _divide_general
    programs, work, meta, options = divide(tensors, args, "forward", HAS_V=out.v is not None)
    angles = AngleArgs(args.positions, args.frequencies, _or(args.basis, args.frequencies))
    kernel[(programs,)](
        tensors, angles, _strides(tensors), work, META=compile_time(meta), **options
    )


def launch_backward(
    rotated: Heads, grads: Heads, args: RotationArgs, out: Heads,
    *, direction: Tensor | None, planes: Tensor | None, wants_angles: bool, wants_positions: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Write the gradients before the rotation to ``out``.

    Args:
        direction: Collinear angles: (N, H, m).
        planes: Collinear angles: the frequencies of their matrix (H, m, f).

    Returns:
        The gradients of the angles, two tensors as from ``empty_angle_gradients``, and that of the
        position of every row (B T, N), empty if not wanted.
    """
    is_collinear = direction is not None
    axes, heads, blocks, _ = args.frequencies.shape
    tensors = Tensors(
        _with_stand_in(rotated)._replace(v=None), _with_stand_in(grads), _with_stand_in(out)
    )
    wants = {
        "HAS_V": out.v is not None, "IS_COLLINEAR": is_collinear, "WANTS_ANGLES": wants_angles,
        "WANTS_POSITIONS": wants_positions,
    }  # fmt: skip
    small = in_registers(rotated, args)
    kernel: Any
    if small:
        kernel = rotate_blocks_backward_kernel
        each = _power_of_2(sums_of_a_block(axes, args.block_size, is_collinear))
        programs, work, meta, options = _divide_small(tensors, args, "backward", EACH=each, **wants)
        parts = heads * blocks
    else:
        kernel = rotate_backward_kernel
        each = _sums_of_a_general_block(args, is_collinear)
        programs, work, meta, options = _divide_general(tensors, args, "backward", **wants)
        parts = programs // work.shares
        if direction is not None:
            # For every plane, the padding of an odd block too, whose channel has a gradient.
            direction = direction[..., None].expand(-1, -1, -1, meta.PADDED).contiguous()
    new = args.frequencies.new_empty
    sums = Sums(
        new((work.shares, heads, blocks, each) if wants_angles else 0),
        new((parts, work.rows, axes) if wants_positions else 0),
    )
    unused = args.frequencies
    angles = AngleArgs(
        args.positions, args.frequencies, _or(args.basis, unused), _or(direction, unused)
    )
    kernel[(programs,)](
        tensors, angles, sums, _strides(tensors), work, META=compile_time(meta), **options
    )
    of_positions = sums.positions.sum(0) if wants_positions else sums.positions
    if not wants_angles:
        return sums.angles, new(0), of_positions
    if args.basis is None:
        of_frequencies = sums.angles.sum(0).view(heads, blocks, axes, -1).permute(2, 0, 1, 3)
        return of_frequencies.contiguous(), new(0), of_positions
    noise = SUM_NOISE["ieee" if small else PRECISIONS[rotated.k.dtype]]
    return *_angle_gradients(sums.angles, args, direction, planes, small, noise), of_positions


def empty_angle_gradients(
    args: RotationArgs, is_collinear: bool, wants_angles: bool
) -> tuple[Tensor, Tensor]:
    """Return uninitialised gradients of the angles.

    Commuting angles: of the frequencies (N, H, m, f) and the basis (H, m, b, b). Collinear angles:
    of the direction (N, H, m) and the matrix (H, m, b, b). Empty if there is no such gradient.
    """
    new, shape = args.frequencies.new_empty, args.frequencies.shape
    if not wants_angles:
        return new(0), new(0)
    first = new(shape[:3] if is_collinear else shape)
    return first, new(0) if args.basis is None else new(args.basis.shape)


def in_registers(heads: Heads, args: RotationArgs) -> bool:
    """Return whether small_blocks.py is used: a thread holds a block; groups are unrolled."""
    group = heads.q.shape[1] // heads.k.shape[1]
    return args.basis is not None and args.block_size in (4, 8) and group <= 8


def _angle_gradients(
    sums: Tensor, args: RotationArgs, direction: Tensor | None, planes: Tensor | None,
    small: bool, noise: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the angles from the sums over tokens (shares, H, m, each)."""
    shares, heads, blocks, each = sums.shape
    padded = _power_of_2(args.block_size) // 2
    out = empty_angle_gradients(args, planes is not None, True)
    meta = GradientMeta(
        AXES=args.frequencies.shape[0], SIZE=args.block_size, PADDED=padded, EACH=each,
        CHUNK=max(1, min(_power_of_2(shares), 1024 // padded**2)),
        IS_COLLINEAR=planes is not None, IS_SKEW=small,
    )  # fmt: skip
    angle_gradients_kernel[(heads * blocks,)](
        SumsOfBlocks(sums, _or(planes, sums), _or(direction, sums), args.basis), out,
        shares, heads * blocks, (12 * noise) ** (1 / 3),
        META=compile_time(meta), num_warps=1 if padded < 16 else 4,
    )  # fmt: skip
    return out


def _sums_of_a_general_block(args: RotationArgs, is_collinear: bool) -> int:
    """Return how many sums over tokens a block has in general_blocks.py."""
    axes, _, _, planes = args.frequencies.shape
    matrices = (args.basis is not None) + is_collinear
    padded = _power_of_2(args.block_size) // 2
    return axes * planes + matrices * args.block_size**2 + 2 * padded * is_collinear


# Programs, sizes at run time, sizes at compile time, and options of the launch.
_Division = tuple[int, Work, Meta, dict[str, Any]]


def _divide_general(tensors: Tensors, args: RotationArgs, way: str, **more: Any) -> _Division:
    """Divide the work of general_blocks.py."""
    size, (batch, _, tokens, _) = args.block_size, tensors.x.k.shape
    blocks, has_basis = args.frequencies.shape[2], args.basis is not None
    tuning = TUNED["basis" if has_basis else "no basis", way]
    padded = _power_of_2(size) // 2
    least = max(1, 8 // padded)  # products need 16 channels at least, and so do memory accesses
    count = _blocks_together(blocks, tuning.columns // (2 * padded), least)
    most = max(16, min(64, tuning.tile // (2 * padded * count)))
    rows = max(16, min(most, _power_of_2(batch * tokens)))
    if way == "backward":
        more |= {"SIDE": max(16, 2 * padded), "PARTS": max(1, min(tuning.warps, rows // 16))}
    return _divide(
        tensors, args, tuning, rows, count,
        HAS_BASIS=has_basis, PADDED=padded, PAIRS=padded * count,
        FULL=2 * padded == size and blocks % count == 0,
        PRECISION=PRECISIONS[tensors.x.k.dtype], **more,
    )  # fmt: skip


def _divide_small(tensors: Tensors, args: RotationArgs, way: str, **more: Any) -> _Division:
    """Divide the work of small_blocks.py."""
    blocks, key, tuning = args.frequencies.shape[2], tensors.x.k, TUNED["small blocks", way]
    count = _blocks_together(blocks, 8, min(4, _power_of_2(blocks)))
    on_cpu = key.device.type == "cpu"
    rows = max(1, (128 if on_cpu else 32 * tuning.warps) // count)
    fast = key.dtype != torch.float32 and not on_cpu
    return _divide(
        tensors, args, tuning, rows, count, BLOCKS=count, FAST=fast, STAGES=tuning.stages, **more
    )


def _divide(
    tensors: Tensors, args: RotationArgs, tuning: Tuning, rows: int, count: int, **more: Any
) -> _Division:
    """Divide the work into programs, for tiles of ``rows`` by ``count`` blocks."""
    batch, key_heads, tokens, _ = tensors.x.k.shape
    blocks = args.frequencies.shape[2]
    units = key_heads * -(-blocks // count)
    programs = tuning.programs * _multiprocessors(tensors.x.k.device)
    shares = max(1, min(-(-batch * tokens // rows), programs // units))
    work = Work(
        rows=batch * tokens, tokens=tokens, prefix=args.prefix,
        position_rows=args.positions.shape[-2], heads=key_heads, blocks=blocks, shares=shares,
    )  # fmt: skip
    meta = Meta(
        GROUP=tensors.x.q.shape[1] // key_heads, AXES=args.frequencies.shape[0],
        SIZE=args.block_size, HALVES=args.halves,
        PER_SAMPLE=args.positions.ndim == 3 and args.positions.shape[0] > 1,
        FLAT=_is_flat(tensors), ROWS=rows, **more,
    )  # fmt: skip
    # enable_fp_fusion: Triton 3.10 will not fuse by default.
    options = {"num_warps": tuning.warps, "num_stages": 1, "enable_fp_fusion": True}
    return units * shares, work, meta, options


def _power_of_2(number: int) -> int:
    """Return the least power of two that is no less. (Triton's own is slow outside of kernels.)"""
    return 1 << (number - 1).bit_length() if number > 1 else 1


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    # Interpreted on a CPU, few programs with many rows each take the least time.
    return 1 if device.type == "cpu" else 132


def _blocks_together(blocks: int, most: int, least: int) -> int:
    """Return how many blocks of a head a program has: a power of two, a divisor if possible."""
    count = max(least, min(_power_of_2(blocks), most))
    while count > least and blocks % count:
        count //= 2
    return count


def _with_stand_in(heads: Heads) -> Heads:
    """Return q, k and v with the channels of a token contiguous.

    Where there is no v, k takes its place and is not touched: the kernel has the same parameters.
    """
    q, k, v = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in heads)
    return Heads(q, k, k if v is None else v)


def _strides(tensors: Tensors) -> Tensors:
    strides = [
        heads and Heads(*(x if x is None else x.stride()[:3] for x in heads)) for heads in tensors
    ]
    return Tensors(*strides)  # type: ignore[arg-type]


def _is_flat(tensors: Tensors) -> bool:
    """Return whether in all of them samples follow each other as tokens do."""
    every = (x for heads in tensors if heads for x in heads if x is not None)
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2) for x in every)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x
