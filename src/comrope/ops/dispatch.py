"""Which backend rotates, and why: by what the angles are, and by device and dtype."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from comrope import _checks
from comrope._dtypes import compute_dtype, settled_when_compiled
from comrope.angles import (
    Angles,
    Free,
    Line,
    Torus,
    block_size_of,
    skew_spectrum,
    spectrum_by_eigh,
)

__all__ = ["BACKENDS", "Choice", "choose_backend"]

BACKENDS = ("auto", "reference", "spectral", "triton")
OLDEST_TRITON = (3, 6)  # of those that they were tried with
OLDEST_GPU = (8, 0)
MOST_AXES = 4
LARGEST_BLOCK, LARGEST_FREE_BLOCK = 64, 32  # of what a kernel holds in registers


class Choice(NamedTuple):
    """A backend and the reason for it."""

    backend: str
    reason: str


def choose_backend(
    angles: Angles,
    backend: str = "auto",
    q: Tensor | None = None,
    k: Tensor | None = None,
    positions: Tensor | None = None,
    channel_order: str = "interleaved",
) -> Choice:
    """The backend that ``rotate`` will use; without tensors, whether it could use it at all."""
    _checks.one_of("backend", backend, BACKENDS)
    if backend == "reference":
        return Choice("reference", "asked for")
    commute = not isinstance(angles, Free)
    if backend == "spectral":
        if not commute:
            raise ValueError(
                "backend: 'spectral' needs angle matrices that commute, and LieRE's on more than "
                "one axis do not; expected 'auto', 'triton' or 'reference'"
            )
        return Choice("spectral", "asked for")
    ours = "spectral" if commute else "reference"
    if backend == "auto" and q is None:
        return Choice(ours, "no tensors are given")
    obstacle = (  # triton is imported last, and only where it may be used
        _tensor_obstacle(angles, q, k, positions)
        or _angles_obstacle(angles, channel_order)
        or _software_obstacle()
    )
    if backend == "triton":
        if obstacle:
            raise ValueError(f"backend: 'triton' cannot run here: {obstacle}; expected 'auto'")
        return Choice("triton", "asked for")
    if obstacle is None and q is not None and q.is_cuda:
        return Choice("triton", "the tensors are on a GPU that it knows")
    return Choice(ours, obstacle or "interpreted kernels are slow: they must be asked for")


def _angles_obstacle(angles: Angles, channel_order: str) -> str | None:
    """Why the kernels cannot serve these angles on any device."""
    size = block_size_of(angles)
    axes = angles.frequencies.shape[0] if isinstance(angles, Torus) else 0
    axes = angles.direction.shape[0] if isinstance(angles, Line) else axes
    if axes > MOST_AXES:
        return f"its kernels know up to {MOST_AXES} axes, not {axes}"
    if isinstance(angles, Free) and size > LARGEST_FREE_BLOCK:
        return f"its kernels exponentiate blocks of up to {LARGEST_FREE_BLOCK}, not {size}"
    has_basis = isinstance(angles, Line) or (isinstance(angles, Torus) and angles.basis is not None)
    if has_basis and size > LARGEST_BLOCK:
        return f"its kernels change the basis of blocks of up to {LARGEST_BLOCK}, not {size}"
    if channel_order == "half" and (size % 2 or isinstance(angles, Free)):
        return "its kernels know channel_order 'half' for commuting methods of even block size only"
    return None


@skew_spectrum.register_kernel("cuda")
def _spectrum_on_gpu(skew: Tensor) -> tuple[Tensor, Tensor]:
    """One launch that does not stop the queue, where there is a kernel for it; else eigh."""
    obstacle = _software_obstacle() or _gpu_obstacle(skew.device.index)
    if not obstacle and skew.dtype in (torch.float32, torch.float64):
        from comrope.ops.kernels.spectrum import skew_spectrum_kernel, supported

        if supported(skew.shape[-1]):
            with torch.cuda.device_of(skew):
                return skew_spectrum_kernel(skew)
    return spectrum_by_eigh(skew)


@settled_when_compiled
def _software_obstacle() -> str | None:
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return None


def _tensor_obstacle(
    angles: Angles, q: Tensor | None, k: Tensor | None, positions: Tensor | None
) -> str | None:
    """Why the kernels cannot serve these tensors."""
    if q is None or k is None or positions is None:
        return None
    if not torch.compiler.is_compiling() and _transformed():
        return "its kernels know no function transforms (vmap, jvp, second derivatives)"
    parts = [part for part in angles if isinstance(part, Tensor)]
    parts += getattr(angles, "known", None) or ()
    wide = compute_dtype(q, k, positions, *parts)
    if wide != torch.float32:
        return f"its kernels compute in float32, and these tensors ask for {wide}"
    if any(x.device != q.device for x in (k, positions, *parts)):
        return "q, k, positions and angles are not all on one device"
    if q.dtype != k.dtype:
        return f"q and k differ in dtype, {q.dtype} and {k.dtype}"
    if q.device.type == "cuda":
        return _gpu_obstacle(q.device.index)
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"the tensors are on {q.device.type}, and its kernels run on an NVIDIA GPU"


def _transformed() -> bool:
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


@settled_when_compiled
def _gpu_obstacle(index: int | None) -> str | None:
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST_GPU or torch.version.hip:
        return f"its kernels need an NVIDIA GPU of compute capability 8.0 or later, not {found}"
    return None
