"""Rotate planes of channels by given angles: the arithmetic that all backends but kernels share.

Shapes: D channels per head, P planes per head. Plane k is channels 2k and 2k + 1 ("interleaved") or
k and k + D / 2 ("half"). With fewer planes than D / 2, blocks have an odd size, and the last
channel of every block is in no plane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope._dtypes import is_compiling_for_cpu, is_traced

__all__ = ["cos_and_sin", "rotate_planes", "torque"]


def cos_and_sin(phase: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of angles.

    In a compiled graph they are one opaque operator. Inductor would otherwise compute them again,
    one by one, for every sample and channel that they rotate.
    """
    if is_compiling_for_cpu(phase):
        return _cos_and_sin(phase)
    return phase.cos(), phase.sin()


@torch.library.custom_op("comrope::cos_and_sin", mutates_args=())
def _cos_and_sin(phase: Tensor) -> tuple[Tensor, Tensor]:
    phase = phase.contiguous()
    return phase.cos(), phase.sin()


@_cos_and_sin.register_fake
def _(phase: Tensor) -> tuple[Tensor, Tensor]:
    return phase.new_empty(phase.shape), phase.new_empty(phase.shape)


@_cos_and_sin.register_vmap
def _(info, in_dims, phase: Tensor):  # type: ignore[no-untyped-def]
    return _cos_and_sin(phase.movedim(in_dims[0], 0)), (0, 0)


def _pairs(x: Tensor, planes: int, half: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second channels of all planes of x (..., D), (..., P) each."""
    if half:
        return x[..., :planes], x[..., planes:]
    if 2 * planes < x.shape[-1]:
        x = x.unflatten(-1, (x.shape[-1] - 2 * planes, -1))[..., :-1].flatten(-2)
    return x[..., 0::2], x[..., 1::2]


def rotate_planes(x: Tensor, cos: Tensor, sin: Tensor, half: bool = False) -> Tensor:
    """Rotate the planes of x (..., D) by angles, given as cos and sin (..., P)."""
    planes = cos.shape[-1]
    if _multiplies_complex(x, half, planes):
        if x.stride(-1) != 1 or x.storage_offset() % 2 or any(s % 2 for s in x.stride()[:-1]):
            x = x.clone(memory_format=torch.contiguous_format)
        turned = torch.view_as_complex(x.unflatten(-1, (planes, 2))) * torch.complex(cos, sin)
        return torch.view_as_real(turned).flatten(-2)
    first, second = _pairs(x, planes, half)
    pair = (
        torch.addcmul(first * cos, second, sin, value=-1),
        torch.addcmul(first * sin, second, cos),
    )
    if half:
        return torch.cat(pair, dim=-1)
    interleaved = torch.stack(pair, dim=-1).flatten(-2)
    blocks = x.shape[-1] - 2 * planes
    if blocks == 0:
        return interleaved
    alone = x.unflatten(-1, (blocks, -1))[..., -1:]
    return torch.cat((interleaved.unflatten(-1, (blocks, -1)), alone), dim=-1).flatten(-2)


def _multiplies_complex(x: Tensor, half: bool, planes: int) -> bool:
    """Return whether one complex multiplication serves: in eager mode on a CPU, where it is one
    pass over memory and the real arithmetic is four. A compiler fuses the real one."""
    whole = not half and 2 * planes == x.shape[-1] and x.device.type == "cpu"
    return whole and not is_traced()


def torque(x: Tensor, grad: Tensor, planes: int, half: bool = False) -> Tensor:
    """Return the gradient of each plane's angle, grad . J x, (..., P), for rotated x (..., D)."""
    first, second = _pairs(x, planes, half)
    grad_first, grad_second = _pairs(grad, planes, half)
    return torch.addcmul(first * grad_second, second, grad_first, value=-1)
