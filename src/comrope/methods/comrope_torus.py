"""ComRoPE-torus, the complete commuting family: a learned orthogonal basis, free frequencies.

Every set of commuting skew-symmetric matrices has this form (docs/theory.md), so this is the
necessary and sufficient condition that the paper lists as missing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.angles import CommutingAngles
from comrope.methods.base import Method, skew_part

__all__ = ["ComRoPETorus", "cayley"]


class ComRoPETorus(Method):
    """Parameters: ``P`` (H, m, b, b), Q = cayley(P - P^T), and ``frequencies`` (N, H, m, f).

    A 2x2 rotation commutes with every basis of its plane, so b = 2 has no ``P``.
    """

    name = "comrope-torus"
    P: nn.Parameter
    frequencies: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        basis = (self.num_heads, self.num_blocks, self.block_size, self.block_size)
        planes = (self.num_axes, self.num_heads, self.num_blocks, self.num_planes)
        return (
            {"frequencies": planes} if self.block_size == 2 else {"P": basis, "frequencies": planes}
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The basis starts at the identity: a random one would vanish in random projections.

        ``normal`` gives the frequencies the second moment that they have in ComRoPE-LD.
        """
        if self.block_size > 2:
            self.P.zero_()
        if self.init == "normal":
            self.frequencies.normal_(std=self.spread * (2 * (self.block_size - 1)) ** 0.5)
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

    def angles_of(  # type: ignore[override]
        self, frequencies: Tensor, P: Tensor | None = None
    ) -> CommutingAngles:
        basis = None if P is None else cayley(skew_part(to_compute_dtype(P)))
        return CommutingAngles(basis, to_compute_dtype(frequencies), self.block_size)


def cayley(skew: Tensor) -> Tensor:
    """(I - S/2)^-1 (I + S/2): skew-symmetric (..., b, b) to orthogonal, exp(S) to second order.

    I - S/2 is never singular, so the solver need not be asked whether it was (on a GPU, asking
    would stop the queue).
    """
    eye = torch.eye(skew.shape[-1], device=skew.device, dtype=skew.dtype)
    return torch.linalg.solve_ex(eye - 0.5 * skew, eye + 0.5 * skew).result
