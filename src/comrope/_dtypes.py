"""Rules for the whole library: angles are float32 or wider, autocast or not; what traces a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "FLOATING",
    "INTEGER",
    "compile_time_constant",
    "compute_dtype",
    "constants_like",
    "in_function_transform",
    "is_compiling_for_cpu",
    "is_traced",
    "no_autocast",
    "tf32_allowed",
    "to_compute_dtype",
]

Answer = TypeVar("Answer")
# The dtypes of vectors and of coordinates. Others, such as float8, have no arithmetic in torch.
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER = (
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def constants_like(values: Sequence[float], like: Tensor) -> Tensor:
    """Return ``values`` as a tensor (N,) of the dtype and on the device of ``like``.

    The values are filled in on the device, because a copy to a GPU would synchronize it.
    """
    return torch.stack([like.new_full((), value) for value in values])


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the widest floating dtype among ``tensors``, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def to_compute_dtype(tensor: Tensor) -> Tensor:
    """Convert to float32, unless the dtype is wider already."""
    return tensor.to(compute_dtype(tensor))


def no_autocast(device: torch.device) -> torch.autocast:
    """Return a context in which matrix products keep the precision of their operands."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def compile_time_constant(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Mark a function that torch.compile evaluates once, while it traces.

    The same as ``torch.compiler.assume_constant_result``, which would import the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@compile_time_constant
def tf32_allowed() -> bool:
    """Return whether float32 matrix products may run in TF32 on a GPU."""
    return torch.get_float32_matmul_precision() != "highest"


def in_function_transform() -> bool:
    """Return whether vmap, jvp or another transform of torch.func is active in eager mode."""
    if torch.compiler.is_compiling():
        return False
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Return whether a call is recorded in a graph, and not only executed."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_compiling_for_cpu(x: Tensor) -> bool:
    """Return whether x is on a CPU in a graph that torch itself will run.

    Not in graphs that are exported for other programs, which know no operator of ours.
    """
    exporting = getattr(torch.compiler, "is_exporting", None)  # since torch 2.7
    exported = (exporting is not None and exporting()) or torch.onnx.is_in_onnx_export()
    return torch.compiler.is_compiling() and not exported and x.device.type == "cpu"
