"""Vanilla RoPE (RoFormer), in any number of axes: fixed frequencies, one axis per block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comrope._dtypes import compute_dtype
from comrope.angles import CommutingAngles
from comrope.methods.base import Method

__all__ = ["RoPE"]


class RoPE(Method):
    """No parameters. ``init="zeros"`` switches the rotation off; both others mean vanilla RoPE.

    Frequencies are made for positions that count tokens or patches. For positions in [0, 1] give
    the grid of the training resolution as ``position_scale``; without it the whole image spans
    less than one radian, and this baseline is weak.
    """

    name = "rope"
    axis_partitioned = True

    anchor: Tensor

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        # Frequencies are worked out where they are used: a buffer would be rounded by .to(bfloat16)
        # and lost by to_empty(). This empty one only remembers where the module lives.
        self.register_buffer("anchor", torch.empty(0, device=device, dtype=dtype), persistent=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def reset_parameters(self) -> None:
        """Nothing to fill."""

    def angles_of(self) -> CommutingAngles:  # type: ignore[override]
        frequencies = self.rope_frequencies(self.anchor).to(compute_dtype(self.anchor))
        if self.init == "zeros":
            frequencies = torch.zeros_like(frequencies)
        frequencies = frequencies[:, None].expand(-1, self.num_heads, -1, -1)
        return CommutingAngles(None, frequencies, self.block_size)
