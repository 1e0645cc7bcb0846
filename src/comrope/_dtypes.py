"""One rule for the whole library: angles are float32 or wider, autocast or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "compute_dtype",
    "no_autocast",
    "numbers_like",
    "settled_when_compiled",
    "tf32_allowed",
    "widen",
]

Answer = TypeVar("Answer")


def numbers_like(values: Sequence[float], like: Tensor) -> Tensor:
    """(N,), of the dtype of ``like`` and filled where it is: numbers sent to a GPU make it wait for
    the CPU."""
    return torch.stack([like.new_full((), value) for value in values])


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest floating dtype among ``tensors``, and never narrower than float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in float32, or as it is where it is wider already."""
    return tensor.to(compute_dtype(tensor))


def no_autocast(device: torch.device) -> torch.autocast:
    """A context in which matrix products keep the precision of their operands."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def settled_when_compiled(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """A question that the compiler asks once.

    As ``torch.compiler.assume_constant_result``, which would load the whole compiler here and now.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@settled_when_compiled
def tf32_allowed() -> bool:
    """Whether float32 matrix products may run in TF32 on a GPU."""
    return torch.get_float32_matmul_precision() != "highest"
