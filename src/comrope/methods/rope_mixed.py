"""RoPE-Mixed (Heo et al., ECCV 2024): 2x2 rotations whose frequencies are learned on every axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CommutingAngles
from comrope.methods.base import Method

__all__ = ["RoPEMixed"]


class RoPEMixed(Method):
    """Parameters: ``frequencies`` (N, H, m, f). The block size only groups the 2x2 rotations."""

    name = "rope-mixed"
    frequencies: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        planes = (self.num_axes, self.num_heads, self.num_blocks, self.num_planes)
        return {"frequencies": planes}

    @classmethod
    @torch.no_grad()
    def like(cls, method: Method, frequencies: Tensor) -> RoPEMixed:
        """Create one with the sizes of another method and the given frequencies."""
        created = cls(
            num_heads=method.num_heads,
            head_dim=method.head_dim,
            num_axes=method.num_axes,
            block_size=method.block_size,
            init="zeros",
            device=frequencies.device,
            dtype=frequencies.dtype,
        )
        created.frequencies.copy_(frequencies)
        return created

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """``normal`` has the spread of P - P^T for P ~ N(0, 1): that of ComRoPE-LD with b = 2."""
        if self.init == "normal":
            self.frequencies.normal_(std=self.spread * 2**0.5)
        elif self.init == "zeros":
            self.frequencies.zero_()
        elif self.init == "turned":
            direction, speeds = self.turned_rope(self.frequencies, self.num_heads)
            self.frequencies.copy_(direction[..., None] * speeds)
        elif self.init == "scattered":
            direction, speeds = self.scattered_rope(self.frequencies, self.num_heads)
            self.frequencies.copy_(direction * speeds)
        else:
            self.frequencies.copy_(self.rope_frequencies(self.frequencies)[:, None])

    def angles_of(self, frequencies: Tensor) -> CommutingAngles:  # type: ignore[override]
        return CommutingAngles(None, to_compute_dtype(frequencies), self.block_size)
