"""ComRoPE-torus, the complete commuting family: a learned orthogonal basis, learned frequencies.

Every set of commuting skew-symmetric matrices has this form (docs/theory.md), so this is the
necessary and sufficient condition that the paper lists as missing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CommutingAngles
from comrope.methods.base import skew_part
from comrope.methods.learned_frequencies import LearnedFrequencies

__all__ = ["ComRoPETorus", "cayley"]


class ComRoPETorus(LearnedFrequencies):
    """Parameters: ``P`` (H, m, b, b), Q = cayley(P - P^T), and those of ``LearnedFrequencies``.

    A 2x2 rotation commutes with every basis of its plane, so b = 2 has no ``P``.
    """

    name = "comrope-torus"
    label = "comrope-torus (all commuting)"
    head_axis: ClassVar = {"P": 0, **LearnedFrequencies.head_axis}
    P: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        basis = (self.num_heads, self.num_blocks, self.block_size, self.block_size)
        planes = super().shapes()
        return planes if self.block_size == 2 else {"P": basis, **planes}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the frequencies, and the basis at the identity.

        Random projections before the rotation would absorb a random basis.
        """
        if self.block_size > 2:
            self.P.zero_()
        super().reset_parameters()

    def init_normal(self, std: float) -> None:
        """Draw frequencies with the second moment that they have in ComRoPE-LD."""
        self.draw_frequencies(std * (2 * (self.block_size - 1)) ** 0.5)

    def angles_of(self, P: Tensor | None = None, **planes: Tensor) -> CommutingAngles:
        basis = None if P is None else cayley(skew_part(to_compute_dtype(P)))
        return CommutingAngles(basis, self.frequencies_of(**planes), self.block_size)


def cayley(skew: Tensor) -> Tensor:
    """Return (I - S/2)^-1 (I + S/2), which is exp(S) to second order.

    Args:
        skew: Skew-symmetric S (..., b, b).

    Returns:
        Orthogonal matrices (..., b, b).

    I - S/2 is never singular, so the solver does not check it: on a GPU, a check would synchronize.
    """
    eye = torch.eye(skew.shape[-1], device=skew.device, dtype=skew.dtype)
    return torch.linalg.solve_ex(eye - 0.5 * skew, eye + 0.5 * skew).result
