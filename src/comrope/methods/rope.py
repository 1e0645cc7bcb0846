"""Vanilla RoPE (RoFormer), on any number of axes: fixed frequencies, one axis per block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comrope import inits
from comrope._dtypes import compute_dtype
from comrope.angles import CommutingAngles
from comrope.methods.base import Method

__all__ = ["RoPE"]


class RoPE(Method):
    """No parameters. ``init="zeros"`` switches the rotation off; the default is ``inits.RoPE()``.

    The frequencies suit positions that count tokens or patches. For positions in [0, 1] pass the
    grid of the training resolution as ``position_scale``. Without it the whole image spans less
    than one radian, and this baseline is weak.
    """

    name = "rope"
    label = "vanilla RoPE"
    learns = False
    starts_at_zero = False
    axis_partitioned = True
    direction_per_plane = False
    block_size_matters = False

    anchor: Tensor

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        # Frequencies are computed in every call: a buffer of them would be rounded by .to(bfloat16)
        # and lost by to_empty(). This empty buffer only holds the device and dtype of the module.
        self.register_buffer("anchor", torch.empty(0, device=device, dtype=dtype), persistent=False)

    @classmethod
    def parse_init(cls, init: str | inits.Init, **keywords: Any) -> inits.Init:
        """Return the initialization; the default ``"normal"`` becomes ``inits.RoPE``."""
        if init in ("zeros", inits.Zeros()):
            inits.parse("rope", **keywords)  # check the keywords, which have no effect
            return inits.Zeros()
        found = inits.parse("rope" if init == "normal" else init, **keywords)
        if isinstance(found, inits.Normal):
            raise ValueError("init: method 'rope' learns no angles; expected rope or zeros")
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""

    def angles_of(self) -> CommutingAngles:  # type: ignore[override]
        device, dtype = self.anchor.device, compute_dtype(self.anchor)
        if isinstance(self.init, inits.RoPE):
            frequencies = self.init.rope_frequencies(self.shape, device).to(dtype)
        else:
            sizes = (self.num_axes, self.num_blocks, self.num_planes)
            frequencies = torch.zeros(sizes, device=device, dtype=dtype)
        frequencies = frequencies[:, None].expand(-1, self.num_heads, -1, -1)
        return CommutingAngles(None, frequencies, self.block_size)
