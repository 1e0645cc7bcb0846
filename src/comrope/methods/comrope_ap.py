"""ComRoPE-AP, the paper's axial partition: block j turns with axis j mod N only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CollinearAngles
from comrope.methods.base import Method, skew_part

__all__ = ["ComRoPEAP"]


class ComRoPEAP(Method):
    """Parameters: ``P`` (H, m, b, b), B_ij = P_j - P_j^T if j = i mod N, else 0 (Eq. AP)."""

    name = "comrope-ap"
    axis_partitioned = True
    P: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"P": (self.num_heads, self.num_blocks, self.block_size, self.block_size)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.init == "normal":
            self.P.normal_(std=self.spread)
        elif self.init == "zeros":
            self.P.zero_()
        else:
            self.P.copy_(self.rope_generators(self.P).sum(0))

    def angles_of(self, P: Tensor) -> CollinearAngles:  # type: ignore[override]
        skew = skew_part(to_compute_dtype(P))
        axes = self.axis_of_block(P.device).to(skew.dtype)
        return CollinearAngles(skew, axes[:, None].expand(-1, P.shape[0], -1))
