"""From angles to operators: what the door calls on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comrope._dtypes import no_autocast
from comrope.angles import Angles, CollinearAngles, CommutingAngles, GeneralAngles
from comrope.ops.kernels import fused
from comrope.ops.kernels.free import rotate_free
from comrope.ops.layout import at_every_token, unpack

__all__ = ["prepare", "rotate_on_gpu", "rotate_packed_on_gpu"]


def rotate_on_gpu(
    q: Tensor, k: Tensor, positions: Tensor, angles: Angles, prefix: int, halves: bool
) -> tuple[Tensor, Tensor]:
    """As ``comrope.ops.rotate``."""
    with no_autocast(q.device):
        if isinstance(angles, GeneralAngles):
            return _rotate_free(q, k, positions, angles, prefix)
        prepared = prepare(positions, angles)
        run = fused.rotate if fused.seen(q, k, *prepared) else fused.RotateEagerly.apply
        return run(q, k, *prepared, prefix, halves)


def rotate_packed_on_gpu(
    qkv: Tensor,
    key_heads: int,
    positions: Tensor,
    angles: Angles,
    prefix: int,
    halves: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``comrope.ops.rotate_packed``."""
    with no_autocast(qkv.device):
        if isinstance(angles, GeneralAngles):
            q, k, v = unpack(qkv, key_heads)
            return *_rotate_free(q, k, positions, angles, prefix), v
        prepared = prepare(positions, angles)
        wanted = (qkv, *(part for part in prepared if isinstance(part, Tensor)))
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanted)
        if learns or not in_place:
            eagerly = not fused.seen(qkv, *prepared)
            run = fused.RotatePackedEagerly.apply if eagerly else fused.rotate_packed
            return run(qkv, *prepared, prefix, halves)
        if qkv.stride(-1) != 1 or _overlaps(qkv):
            qkv = qkv.contiguous()
        positions, frequencies, basis, _, _, _, size = prepared
        fused.rotate_packed_(qkv, positions, frequencies, basis, size, prefix, halves)
        return unpack(qkv, key_heads)


def _overlaps(x: Tensor) -> bool:
    """Whether numbers may share their places in memory: in place they would be turned twice."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach = stride * size if size > 1 else reach
    return False


def prepare(positions: Tensor, angles: CommutingAngles | CollinearAngles) -> tuple[Any, ...]:
    """Positions, frequencies, basis, skew, direction, planes and block size, as the operators ask.

    Without a basis the blocks are mere groups of planes, and are taken apart where they can be.
    """
    positions = positions.float().contiguous()
    if isinstance(angles, CollinearAngles) and angles.skew.shape[-1] == 2:
        angles = angles.as_commuting()
    if isinstance(angles, CollinearAngles):
        cached = angles.cache_spectrum().cached_spectrum
        basis, planes = (part.float().contiguous() for part in cached)  # type: ignore[union-attr]
        skew, direction = angles.skew.float(), angles.direction.float().contiguous()
        frequencies = direction.detach()[..., None] * planes
        return positions, frequencies, basis, skew, direction, planes, skew.shape[-1]
    frequencies, size = angles.frequencies.float(), angles.block_size
    if angles.basis is None and size % 2 == 0:
        frequencies, size = frequencies.flatten(2)[..., None], 2
    basis = None if angles.basis is None else angles.basis.float().contiguous()
    return positions, frequencies.contiguous(), basis, None, None, None, size


def _rotate_free(
    q: Tensor, k: Tensor, positions: Tensor, angles: GeneralAngles, prefix: int
) -> tuple[Tensor, Tensor]:
    positions = at_every_token(positions.float(), q.shape[2], prefix)
    return rotate_free(q, k, positions, angles.skew.float())
