"""A module recorded as a CUDA graph: where batches are small, launching takes longer than the work.

What a GPU does in a forward pass and in the backward pass is recorded once and then replayed, each
at one launch, whatever the number of its kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Replayed", "replay_in_training"]


def replay_in_training(module: nn.Module) -> None:
    """Record ``module(x)`` when it is first called in training, and replay that from then on.

    Only for inputs like the first in shape, dtype and autocast; anything else is computed as ever.
    A forward pass must be followed by its backward pass before the next. Neither parameters nor
    hooks may be added afterwards, and a copy of the module would share the record.
    """
    module.forward = Replayed(module)


class Replayed:
    """A forward of a module on a GPU."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.ordinary = module, module.forward
        self.record: Any = None
        self.kind: tuple[Any, ...] | None = None  # of the input that was recorded

    def __call__(self, x: Tensor, **options: Any) -> Any:
        alone = not options and not x.requires_grad
        learning = self.module.training and torch.is_grad_enabled()
        if not (x.is_cuda and alone and learning):
            return self.ordinary(x, **options)
        if self.record is None:
            self.record, self.kind = self._recorded(x), _kind(x)
        return self.record(x) if _kind(x) == self.kind else self.ordinary(x)

    def _recorded(self, x: Tensor) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        # A cast that was kept from before would be gone when its memory is read again.
        with torch.autocast(
            "cuda", dtype, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False
        ):
            self.module.forward = self.ordinary
            try:
                torch.cuda.make_graphed_callables(self.module, (x.detach().clone(),))
                return self.module.forward
            finally:
                self.module.forward = self


def _kind(x: Tensor) -> tuple[Any, ...]:
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return x.shape, x.stride(), x.dtype, x.device, cast
