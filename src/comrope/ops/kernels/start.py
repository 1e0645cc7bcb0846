"""Launch a kernel without asking anew, every time, which of its compiled forms is meant.

Triton looks that up from all arguments at every launch, which takes the CPU longer than the launch
itself. Here the form is remembered for arguments that are the same number for number and whose
tensors are alike in dtype and alignment: more than Triton itself distinguishes by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["start"]

MOST = 4096  # forms that are remembered; sizes that never come again must not pile up
_known: dict[Any, Any] = {}


def start(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """``kernel[(programs,)](*args, **options)``."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    key = (
        kernel, torch.cuda.current_device() if tensors[0].is_cuda else -1,
        *((x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in args),
        *options.values(),
    )  # fmt: skip
    form = _known.get(key)
    if form is None:
        form = kernel[(programs,)](*args, **options)
        if hasattr(form, "run"):  # no interpreted kernel, which has no forms
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = form
        return
    rest = kernel.arg_names[len(args) :]
    form[(programs, 1, 1)](*args, *(options[name] for name in rest))
