"""Check that the outputs of an evaluation are finite, once per view."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from comrope.experiments.common.errors import UserError

__all__ = ["OutputCheck"]


class OutputCheck:
    """Count the outputs of a model that are not finite.

    The count stays on the device, so that a GPU is not synchronized before the end of a view.

    Args:
        device: The device of the outputs.
    """

    def __init__(self, device: torch.device) -> None:
        self.wrong = torch.zeros((), device=device)

    def add(self, output: Any) -> None:
        """Count a tensor, or tensors in lists."""
        if isinstance(output, Tensor):
            self.wrong += (~output.isfinite()).sum()
        else:
            for part in output:
                self.add(part)

    @contextlib.contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Count all outputs of some modules within the block."""
        hooks = [
            module.register_forward_hook(lambda module, inputs, output: self.add(output))
            for module in modules
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def require_none(wrong: float, view: Any) -> None:
        """Raise if some outputs in a view were not finite.

        Args:
            wrong: Their number, over all processes.
            view: The view, for the message.
        """
        if wrong:
            fields = ", ".join(f"{name} {value}" for name, value in view._asdict().items())
            raise UserError(
                f"view with {fields}: {wrong:.0f} outputs of the model are not finite. If "
                "train.precision is fp16, evaluate with train.precision=no"
            )
