"""RoPE-Mixed (Heo et al., ECCV 2024): 2x2 rotations whose frequencies are learned on every axis."""

from __future__ import annotations

import torch
from torch import Tensor

from comrope.angles import CommutingAngles
from comrope.methods.base import Method
from comrope.methods.learned_frequencies import LearnedFrequencies

__all__ = ["RoPEMixed"]


class RoPEMixed(LearnedFrequencies):
    """Parameters: see ``LearnedFrequencies``. The block size only groups the 2x2 rotations."""

    name = "rope-mixed"
    label = "RoPE-Mixed"
    block_size_matters = False

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
        self.draw_frequencies(std * 2**0.5)

    def angles_of(self, **parameters: Tensor) -> CommutingAngles:
        return CommutingAngles(None, self.frequencies_of(**parameters), self.block_size)
