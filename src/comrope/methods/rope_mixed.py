"""RoPE-Mixed (Heo et al., ECCV 2024): 2x2 rotations whose frequencies are learned on every axis."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CommutingAngles
from comrope.inits import PlaneInit
from comrope.methods.base import Method

__all__ = ["RoPEMixed"]


class RoPEMixed(Method):
    """Parameters: ``frequencies`` (N, H, m, f). The block size only groups the 2x2 rotations."""

    name = "rope-mixed"
    label = "RoPE-Mixed"
    head_axis: ClassVar = {"frequencies": 1}
    block_size_matters = False
    frequencies: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        planes = (self.num_axes, self.num_heads, self.num_blocks, self.num_planes)
        return {"frequencies": planes}

    @classmethod
    @torch.no_grad()
    def like(cls, method: Method, frequencies: Tensor) -> RoPEMixed:
        """Create a ``RoPEMixed`` with the sizes of another method and the given frequencies.

        If heads share the parameters of that method, they share the frequencies as well.
        """
        created = cls(
            num_heads=method.num_heads,
            head_dim=method.head_dim,
            num_axes=method.num_axes,
            block_size=method.block_size,
            init="zeros",
            shared_heads=method.shared_heads,
            device=frequencies.device,
            dtype=frequencies.dtype,
        )
        created.frequencies.copy_(frequencies[:, : created.frequencies.shape[1]])
        return created

    def init_normal(self, std: float) -> None:
        """Draw with the standard deviation of P - P^T, P ~ N(0, 1): ComRoPE-LD's for b = 2."""
        self.frequencies.normal_(std=std * 2**0.5)

    def init_planes(self, init: PlaneInit) -> None:
        planes = init.planes(self.shape, self.frequencies)
        self.frequencies.copy_(planes.direction * planes.speed)

    def angles_of(self, frequencies: Tensor) -> CommutingAngles:  # type: ignore[override]
        return CommutingAngles(None, to_compute_dtype(frequencies), self.block_size)
