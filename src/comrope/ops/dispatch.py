"""Select the backend: from the form of the angles, the device, the dtypes and the software."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from comrope import _checks
from comrope._dtypes import compile_time_constant, compute_dtype, in_function_transform
from comrope.angles import (
    Angles,
    CollinearAngles,
    CommutingAngles,
    GeneralAngles,
    block_size_of,
    skew_spectrum,
    spectrum_by_eigh,
)

__all__ = ["BACKENDS", "BackendChoice", "select_backend"]

BACKENDS = ("auto", "reference", "spectral", "triton")
OLDEST_TRITON = (3, 6)  # the oldest that the kernels are tested with
OLDEST_GPU = (8, 0)
MOST_AXES = 4
LARGEST_BLOCK, LARGEST_GENERAL_BLOCK = 64, 32  # limited by the registers of a GPU


class BackendChoice(NamedTuple):
    """A backend and the reason why it was selected."""

    backend: str
    reason: str


def select_backend(
    angles: Angles,
    backend: str = "auto",
    q: Tensor | None = None,
    k: Tensor | None = None,
    positions: Tensor | None = None,
    channel_order: str = "interleaved",
) -> BackendChoice:
    """Return the backend that ``rotate`` uses for these arguments.

    Without tensors, return the backend that these angles allow.

    Raises:
        ValueError: If the backend is unknown or cannot be used.
    """
    _checks.one_of("backend", backend, BACKENDS)
    if backend == "reference":
        return BackendChoice("reference", "requested")
    commute = not isinstance(angles, GeneralAngles)
    if backend == "spectral":
        if not commute:
            raise ValueError(
                "backend: 'spectral' needs angle matrices that commute, and LieRE's on more than "
                "one axis do not; expected 'auto', 'triton' or 'reference'"
            )
        return BackendChoice("spectral", "requested")
    fallback = "spectral" if commute else "reference"
    if backend == "auto" and q is None:
        return BackendChoice(fallback, "no tensors are given")
    unsupported = (  # triton is imported last, and only if it may be used
        _reason_tensors_unsupported(angles, q, k, positions)
        or _reason_angles_unsupported(angles, channel_order)
        or _reason_software_unsupported()
    )
    if backend == "triton":
        if unsupported:
            raise ValueError(f"backend: 'triton' cannot run here: {unsupported}; expected 'auto'")
        return BackendChoice("triton", "requested")
    if unsupported is None and q is not None and q.is_cuda:
        return BackendChoice("triton", "the tensors are on a supported GPU")
    return BackendChoice(
        fallback, unsupported or "interpreted kernels are slow, so they must be requested"
    )


def _reason_angles_unsupported(angles: Angles, channel_order: str) -> str | None:
    """Return why the kernels cannot use these angles on any device."""
    size = block_size_of(angles)
    axes = angles.frequencies.shape[0] if isinstance(angles, CommutingAngles) else 0
    axes = angles.direction.shape[0] if isinstance(angles, CollinearAngles) else axes
    if axes > MOST_AXES:
        return f"the kernels support at most {MOST_AXES} axes, not {axes}"
    general = isinstance(angles, GeneralAngles)
    if general and size > LARGEST_GENERAL_BLOCK:
        return (
            f"the kernels exponentiate blocks of size {LARGEST_GENERAL_BLOCK} or less, not {size}"
        )
    has_basis = isinstance(angles, CollinearAngles) or (
        isinstance(angles, CommutingAngles) and angles.basis is not None
    )
    if has_basis and size > LARGEST_BLOCK:
        return f"the kernels change the basis of blocks of size {LARGEST_BLOCK} or less, not {size}"
    if channel_order == "half" and (size % 2 or general):
        return (
            "the kernels support channel_order 'half' for commuting methods of even block size only"
        )
    return None


@skew_spectrum.register_kernel("cuda")
def _spectrum_on_gpu(skew: Tensor) -> tuple[Tensor, Tensor]:
    """Use a kernel that does not synchronize if one supports the matrices, otherwise eigh."""
    unsupported = _reason_software_unsupported() or _reason_gpu_unsupported(skew.device.index)
    if not unsupported and skew.dtype in (torch.float32, torch.float64):
        from comrope.ops.kernels.jacobi import skew_spectrum_kernel, supported

        if supported(skew.shape[-1]):
            with torch.cuda.device_of(skew):
                return skew_spectrum_kernel(skew)
    return spectrum_by_eigh(skew)


@compile_time_constant
def _reason_software_unsupported() -> str | None:
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return None


def _reason_tensors_unsupported(
    angles: Angles, q: Tensor | None, k: Tensor | None, positions: Tensor | None
) -> str | None:
    """Return why the kernels cannot use these tensors."""
    if q is None or k is None or positions is None:
        return None
    if in_function_transform():
        return "the kernels support no function transforms (vmap, jvp, second derivatives)"
    parts = [part for part in angles if isinstance(part, Tensor)]
    parts += getattr(angles, "cached_spectrum", None) or ()
    wide = compute_dtype(q, k, positions, *parts)
    if wide != torch.float32:
        return f"the kernels compute in float32, and these tensors need {wide}"
    if any(x.device != q.device for x in (k, positions, *parts)):
        return "q, k, positions and angles are not all on one device"
    if q.dtype != k.dtype:
        return f"q and k differ in dtype, {q.dtype} and {k.dtype}"
    if q.device.type == "cuda":
        return _reason_gpu_unsupported(q.device.index)
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"the tensors are on {q.device.type}, and the kernels run on an NVIDIA GPU"


@compile_time_constant
def _reason_gpu_unsupported(index: int | None) -> str | None:
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST_GPU or torch.version.hip:
        return f"the kernels need an NVIDIA GPU of compute capability 8.0 or later, not {found}"
    return None
