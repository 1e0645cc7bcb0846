"""LieRE (Ostmeier et al.): any skew-symmetric matrix for every axis. They do not commute."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CollinearAngles, GeneralAngles, plane_generators
from comrope.inits import PlaneInit
from comrope.methods.base import Method, skew_part

__all__ = ["LieRE"]


class LieRE(Method):
    """Parameters: ``P`` (N, H, m, b, b), A_i = P_i - P_i^T. On one axis it commutes trivially."""

    name = "liere"
    label = "LieRE"
    head_axis: ClassVar = {"P": 1}
    commutes = False
    P: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        block = (self.block_size, self.block_size)
        return {"P": (self.num_axes, self.num_heads, self.num_blocks, *block)}

    def init_normal(self, std: float) -> None:
        self.P.normal_(std=std)

    def init_planes(self, init: PlaneInit) -> None:
        """Set matrices that commute; learning makes them different."""
        planes = init.planes(self.shape, self.P)
        frequencies = planes.direction * planes.speed
        self.P.copy_(0.5 * plane_generators(frequencies, self.block_size))

    def angles_of(  # type: ignore[override]
        self, P: Tensor
    ) -> GeneralAngles | CollinearAngles:
        skew = skew_part(to_compute_dtype(P))
        if self.num_axes == 1:
            return CollinearAngles(skew[0], skew.new_ones(1, P.shape[1], self.num_blocks))
        return GeneralAngles(skew)
