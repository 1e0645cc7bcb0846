"""ComRoPE-AP, the paper's axial partition: block j rotates with axis j mod N only."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CollinearAngles, plane_generators
from comrope.inits import PlaneInit, axis_of_block
from comrope.methods.base import Method, skew_part

__all__ = ["ComRoPEAP"]


class ComRoPEAP(Method):
    """Parameters: ``P`` (H, m, b, b), B_ij = P_j - P_j^T if j = i mod N, else 0 (Eq. AP)."""

    name = "comrope-ap"
    label = "ComRoPE-AP"
    head_axis: ClassVar = {"P": 0}
    axis_partitioned = True
    direction_per_plane = False
    P: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"P": (self.num_heads, self.num_blocks, self.block_size, self.block_size)}

    def init_normal(self, std: float) -> None:
        self.P.normal_(std=std)

    def init_planes(self, init: PlaneInit) -> None:
        planes = init.planes(self.shape, self.P)
        self.P.copy_(0.5 * plane_generators(planes.speed, self.block_size))

    def angles_of(self, P: Tensor) -> CollinearAngles:  # type: ignore[override]
        skew = skew_part(to_compute_dtype(P))
        axes = axis_of_block(self.shape, P.device).to(skew.dtype)
        return CollinearAngles(skew, axes[:, None].expand(-1, P.shape[0], -1))
