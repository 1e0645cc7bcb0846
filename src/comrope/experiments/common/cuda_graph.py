"""A module as a CUDA graph: for small batches, launching kernels takes longer than running them.

The kernels of the forward and of the backward pass are recorded once. Then one launch replays a
pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Replayed", "replay_in_training"]


def replay_in_training(module: nn.Module, like: Tensor) -> None:
    """Record ``module(like)`` under the current autocast, and replay it in training.

    Only inputs of the same shape, dtype and autocast are replayed; others are computed as usual.

    - During the recording nothing else may use the GPU, not even a thread that pins memory.
    - Gradients cannot be accumulated over several backward passes: each writes to the same memory.
    - No parameters or hooks may be added later, and a copy of the module would share the record.
    """
    module.train()
    dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
    ordinary = module.forward
    # The memory of a cached cast would be freed before it is read again.
    with torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False):
        torch.cuda.make_graphed_callables(module, (like.detach().clone(),))
    # Gradients are recorded on a separate stream; torch would warn about that at every start.
    if warn := getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None):
        warn(False)
    module.forward = Replayed(module, ordinary, module.forward, _kind(like))


class Replayed:
    """The forward of a module on a GPU: the record if it is valid, else the ordinary one."""

    def __init__(self, module: nn.Module, ordinary: Any, record: Any, kind: tuple[Any, ...]):
        self.module, self.ordinary, self.record, self.kind = module, ordinary, record, kind

    def __call__(self, x: Tensor, **options: Any) -> Any:
        learning = self.module.training and torch.is_grad_enabled() and not x.requires_grad
        if learning and not options and _kind(x) == self.kind:
            return self.record(x)
        return self.ordinary(x, **options)


def _kind(x: Tensor) -> tuple[Any, ...]:
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return x.shape, x.stride(), x.dtype, x.device, cast
