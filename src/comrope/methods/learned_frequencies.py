"""The base class of methods that learn the frequencies of their planes directly."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from comrope._dtypes import to_compute_dtype
from comrope.inits import PlaneInit
from comrope.methods.base import Method

__all__ = ["LearnedFrequencies"]


class LearnedFrequencies(Method):
    """Parameters: ``frequencies`` (N, H, m, f), or their logarithms.

    With ``log_frequencies`` the parameters are ``log_speed`` (H, m, f) and, on several axes,
    ``direction`` (N, H, m, f): w = exp(log_speed) direction / |direction|. The reference on one
    axis is GRAPE (Zhang et al., arXiv 2512.07805), whose code learns exp(log_freq). A step of Adam
    then changes every frequency by the same share, and not by the same amount.

    - On one axis frequencies are positive. The projections of queries and keys can express the
      sign, so it is dropped where an initialization draws one.
    - A frequency of zero has no logarithm: initializations with one are refused.
    """

    head_axis: ClassVar = {"frequencies": 1, "log_speed": 0, "direction": 1}
    learns_frequencies = True
    frequencies: nn.Parameter
    log_speed: nn.Parameter
    direction: nn.Parameter

    def shapes(self) -> dict[str, tuple[int, ...]]:
        planes = (self.num_heads, self.num_blocks, self.num_planes)
        of_axes = (self.num_axes, *planes)
        if not self.log_frequencies:
            return {"frequencies": of_axes}
        return {"log_speed": planes, **({} if self.num_axes == 1 else {"direction": of_axes})}

    def init_planes(self, init: PlaneInit) -> None:
        planes = init.planes(self.shape, next(self.parameters()))
        self.set_frequencies(planes.direction * planes.speed)

    def draw_frequencies(self, std: float) -> None:
        """Draw all frequencies from a normal distribution."""
        shape = self.shape
        sizes = (shape.num_axes, shape.num_heads, shape.num_blocks, shape.num_planes)
        self.set_frequencies(next(self.parameters()).new_empty(sizes).normal_(std=std))

    def set_frequencies(self, frequencies: Tensor) -> None:
        """Set the parameters so that the frequencies (N, H, m, f) are given ones."""
        if not self.log_frequencies:
            self.frequencies.copy_(frequencies)
            return
        wide = frequencies.double()
        speed = torch.linalg.vector_norm(wide, dim=0)
        if not speed.is_meta and not (speed > 0).all():
            raise ValueError(
                f"log_frequencies: expected frequencies other than zero, which has no logarithm; "
                f"got planes without rotation from init={self.init}"
            )
        self.log_speed.copy_(speed.log())
        if self.num_axes > 1:
            self.direction.copy_(wide / speed)

    def frequencies_of(
        self,
        frequencies: Tensor | None = None,
        log_speed: Tensor | None = None,
        direction: Tensor | None = None,
    ) -> Tensor:
        """Return the frequencies (N, H, m, f) of parameters, in float32 or wider."""
        if frequencies is not None:
            return to_compute_dtype(frequencies)
        assert log_speed is not None
        speed = to_compute_dtype(log_speed).exp()
        if direction is None:
            return speed[None]
        return nn.functional.normalize(to_compute_dtype(direction), dim=0) * speed
