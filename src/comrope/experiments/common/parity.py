"""Compare a network with its reference implementation, before its speed is reported."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comrope.analysis import rotary_modules

__all__ = ["TOLERANCE", "parity_error"]

TOLERANCE = 1e-3  # relative, of float32 logits after many layers


@torch.no_grad()
def parity_error(model: nn.Module, images: Tensor) -> float | None:
    """Return the relative error of the logits against block-wise matrix exponentials.

    Returns:
        ``|found - expected| / |expected|`` over all logits; None for a model without rotations.
    """
    modules = rotary_modules(model).values()
    if not modules:
        return None
    found = model(images)
    backends = [module.backend for module in modules]
    for module in modules:
        module.backend = "reference"
    expected = model(images)
    for module, backend in zip(modules, backends, strict=True):
        module.backend = backend
    return float((found - expected).norm() / expected.norm())
