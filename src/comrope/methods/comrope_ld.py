"""ComRoPE-LD, the paper's linear dependence: every axis rotates with a multiple of one matrix."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CollinearAngles, plane_generators
from comrope.inits import PlaneInit
from comrope.methods.base import Method, skew_part

__all__ = ["ComRoPELD"]


class ComRoPELD(Method):
    """Parameters: ``P`` (H, m, b, b) and ``theta`` (N, H, m), A_i = theta_i (P - P^T) (Eq. LD).

    With ``shared_theta`` all heads have one theta (N, 1, m), as in the authors' code; with
    ``shared_heads`` they have one ``P`` too.
    """

    name = "comrope-ld"
    label = "ComRoPE-LD"
    head_axis: ClassVar = {"P": 0, "theta": 1}
    options: ClassVar = {"shared_theta": False}
    direction_per_plane = False
    P: nn.Parameter
    theta: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        theta_heads = 1 if self.settings["shared_theta"] else self.num_heads
        return {
            "P": (self.num_heads, self.num_blocks, self.block_size, self.block_size),
            "theta": (self.num_axes, theta_heads, self.num_blocks),
        }

    def init_normal(self, std: float) -> None:
        self.P.normal_(std=std)
        self.theta.normal_()

    def init_zeros(self) -> None:
        """Set P = 0 and draw theta: with theta = 0 as well, neither would get a gradient."""
        self.P.zero_()
        self.theta.normal_()

    def init_planes(self, init: PlaneInit) -> None:
        """Put the scale of the positions into P, so that theta is of size one in every case."""
        drawn = init.blocks(self.shape, self.P, direction_heads=self.theta.shape[1])
        self.P.copy_(0.5 * drawn.unit * plane_generators(drawn.speed, self.block_size))
        self.theta.copy_(drawn.direction[..., 0] / drawn.unit)

    def angles_of(self, P: Tensor, theta: Tensor) -> CollinearAngles:  # type: ignore[override]
        if self.settings["shared_theta"]:  # by all heads of a layer
            theta = theta.repeat_interleave(P.shape[0] // theta.shape[1], dim=1)
        return CollinearAngles(skew_part(to_compute_dtype(P)), to_compute_dtype(theta))
