"""From a canvas with any number of axes to tokens: patches, and absolute positions.

Shapes: B batch, C channels, X_i sizes of the canvas, T tokens, N axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comrope._dtypes import compute_dtype, no_autocast

__all__ = ["AbsolutePositions", "Patches"]


class Patches(nn.Module):
    """Cut (B, C, X_1, ..., X_N) into patches and project each: (B, T, dim), last axis fastest."""

    def __init__(self, patch_size: Sequence[int], in_chans: int, dim: int) -> None:
        super().__init__()
        self.patch_size = tuple(patch_size)
        self.in_chans = in_chans
        self.proj = nn.Linear(in_chans * math.prod(self.patch_size), dim)

    def grid_shape(self, canvas: Sequence[int]) -> tuple[int, ...]:
        """Return the number of patches along each axis of a canvas; its sizes must be multiples."""
        if len(canvas) != len(self.patch_size) or any(
            size < patch or size % patch
            for size, patch in zip(canvas, self.patch_size, strict=True)
        ):
            raise ValueError(
                f"x: expected {len(self.patch_size)} sizes that are multiples of patch_size "
                f"{self.patch_size}, got {tuple(canvas)}"
            )
        return tuple(size // patch for size, patch in zip(canvas, self.patch_size, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        shape = self.grid_shape(x.shape[2:])
        num_axes = len(shape)
        split = [n for pair in zip(shape, self.patch_size, strict=True) for n in pair]
        x = x.reshape(*x.shape[:2], *split)  # (B, C, g_1, p_1, ..., g_N, p_N)
        grid_dims = range(2, 2 + 2 * num_axes, 2)
        x = x.permute(0, *grid_dims, 1, *(d + 1 for d in grid_dims))
        return self.proj(x.flatten(1 + num_axes).flatten(1, num_axes))


class AbsolutePositions(nn.Module):
    """APE: one learned vector per patch of the training grid, with multilinear interpolation.

    The embedding at x in [0, 1]^N is interpolated between the 2^N nearest patch centres. Outside
    of the outermost centres it is constant.
    """

    def __init__(self, grid: Sequence[int], dim: int) -> None:
        super().__init__()
        self.grid = tuple(grid)
        self.codebook = nn.Parameter(torch.zeros(math.prod(self.grid), dim))

    def weights(self, positions: Tensor) -> Tensor:
        """Return the weights of codebook entries at every position: (..., T, N) to (..., T, n)."""
        positions = positions.to(compute_dtype(positions))
        shares = positions.new_ones(*positions.shape[:-1], 1)
        for axis, size in enumerate(self.grid):
            coordinate = (positions[..., axis : axis + 1] * size - 0.5).clamp(0, size - 1)
            centers = torch.arange(size, device=positions.device, dtype=positions.dtype)
            hat = (1 - (coordinate - centers).abs()).clamp_min(0)  # (..., T, X_axis)
            shares = (shares[..., :, None] * hat[..., None, :]).flatten(-2)
        return shares

    def forward(self, positions: Tensor) -> Tensor:
        """Return the embedding at positions: (T, N) or (B, T, N) to (T, dim) or (B, T, dim)."""
        if positions.shape[-1] != len(self.grid):
            raise ValueError(
                f"positions: expected {len(self.grid)} axes, got {positions.shape[-1]}"
            )
        with no_autocast(positions.device):
            return self.weights(positions).to(self.codebook.dtype) @ self.codebook
