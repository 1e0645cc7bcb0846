"""ComRoPE-LD, the paper's linear dependence: every axis turns with a multiple of one matrix."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CollinearAngles, plane_generators
from comrope.methods.base import Method, skew_part

__all__ = ["ComRoPELD"]


class ComRoPELD(Method):
    """Parameters: ``P`` (H, m, b, b) and ``theta`` (N, H, m), A_i = theta_i (P - P^T) (Eq. LD).

    With ``shared_theta`` all heads have one theta (N, 1, m), as in the authors' code.
    """

    name = "comrope-ld"
    options: ClassVar = {"shared_theta": False}
    P: nn.Parameter
    theta: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        theta_heads = 1 if self.settings["shared_theta"] else self.num_heads
        return {
            "P": (self.num_heads, self.num_blocks, self.block_size, self.block_size),
            "theta": (self.num_axes, theta_heads, self.num_blocks),
        }

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """``zeros`` is P = 0 alone: with theta = 0 as well, neither would get a gradient."""
        if self.init == "rope":
            self.P.copy_(self.rope_generators(self.P).sum(0))
            self.theta.copy_(self.axis_of_block(self.P.device)[:, None])
            return
        if self.init == "turned":
            self._set(*self.turned_rope(self.P, self.theta.shape[1]))
            return
        if self.init == "scattered":
            direction, _ = self.scattered_rope(self.P, self.theta.shape[1], by_block=True)
            _, speeds = self.scattered_rope(self.P, self.num_heads)
            self._set(direction[..., 0], speeds)
            return
        if self.init == "normal":
            self.P.normal_(std=self.spread)
        else:
            self.P.zero_()
        self.theta.normal_()

    def _set(self, direction: Tensor, speeds: Tensor) -> None:
        scale = max(self.position_scale)  # in P, as for "rope": theta is of the size of one
        self.P.copy_(0.5 * scale * plane_generators(speeds, self.block_size))
        self.theta.copy_(direction / scale)

    def angles_of(self, P: Tensor, theta: Tensor) -> CollinearAngles:  # type: ignore[override]
        if self.settings["shared_theta"]:  # by all heads of a layer
            theta = theta.repeat_interleave(self.num_heads, dim=1)
        return CollinearAngles(skew_part(to_compute_dtype(P)), to_compute_dtype(theta))
