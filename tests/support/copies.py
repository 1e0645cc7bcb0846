"""Record copies between devices."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Crossings(TorchDispatchMode):
    """Records copies between devices. (Sizes that depend on values, such as those of masks, are an
    error with such tensors anyway.)"""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1:
            self.seen.append(str(func))
        return out


def crossings(forward):
    with Crossings() as crossed:
        forward()
    return crossed.seen
