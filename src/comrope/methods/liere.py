"""LieRE (Ostmeier et al.): free skew-symmetric matrices for every axis. They do not commute."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CollinearAngles, GeneralAngles, plane_generators
from comrope.methods.base import Method, skew_part

__all__ = ["LieRE"]


class LieRE(Method):
    """Parameters: ``P`` (N, H, m, b, b), A_i = P_i - P_i^T. On one axis it commutes trivially."""

    name = "liere"
    head_axis: ClassVar = {"P": 1}
    P: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        block = (self.block_size, self.block_size)
        return {"P": (self.num_axes, self.num_heads, self.num_blocks, *block)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.init == "normal":
            self.P.normal_(std=self.spread)
        elif self.init == "zeros":
            self.P.zero_()
        elif self.init == "turned":  # a start from which they commute
            direction, speeds = self.turned_rope(self.P, self.num_heads)
            generators = 0.5 * plane_generators(speeds, self.block_size)
            self.P.copy_(direction[..., None, None] * generators)
        elif self.init == "scattered":  # and so here
            direction, speeds = self.scattered_rope(self.P, self.num_heads)
            self.P.copy_(0.5 * plane_generators(direction * speeds, self.block_size))
        else:
            self.P.copy_(self.rope_generators(self.P)[:, None])

    def angles_of(self, P: Tensor) -> GeneralAngles | CollinearAngles:  # type: ignore[override]
        skew = skew_part(to_compute_dtype(P))
        if self.num_axes == 1:
            return CollinearAngles(skew[0], skew.new_ones(1, P.shape[1], self.num_blocks))
        return GeneralAngles(skew)
