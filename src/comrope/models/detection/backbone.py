"""A plain ViT as the backbone of a detector: a feature map, with attention in windows.

Shapes: B batch, H x W patches, T = H W, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor, nn

from comrope import _checks
from comrope import positions as coordinates
from comrope._dtypes import constants_like
from comrope.analysis import rotary_modules
from comrope.models.attention import attend_to_all
from comrope.models.detection.pyramid import windowed_attention
from comrope.models.vit import ViT

__all__ = ["PlainBackbone", "check_images"]

SCALES = ("relative", "patch")


class PlainBackbone(nn.Module):
    """Compute the feature map (B, C, H, W) of images (B, 3, X, Y) with a ViT, as in ViTDet.

    Most blocks attend within windows, a few globally. Coordinates are those in the whole image in
    both cases, because rotations are applied before the map is cut into windows. Windows at the
    right and lower edge may be smaller, so nothing is padded or masked.

    Args:
        vit: The model, on two axes. It is changed, not copied: its class token and its classifier
            are removed.
        window: Patches along each side of a window.
        global_blocks: Indices of the blocks that attend globally, by default the last block of
            every quarter of the depth.
        scale: Coordinates for rotations in images of another size than the training size of
            ``vit``: ``"relative"``, the image is [0, 1] on each axis, as in the ViT; ``"patch"``,
            neighbouring patches have the same distance as in training. Absolute positions are
            always relative.
    """

    def __init__(
        self,
        vit: ViT,
        *,
        window: int = 14,
        global_blocks: Iterable[int] | None = None,
        scale: str = "relative",
    ) -> None:
        super().__init__()
        check_images(vit)
        depth = len(vit.blocks)
        if global_blocks is None:
            global_blocks = (depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4))
            global_blocks = [index for index in global_blocks if index >= 0]
        self.global_blocks = frozenset(global_blocks)
        for index in self.global_blocks:
            if index not in range(depth):
                raise ValueError(
                    f"global_blocks: expected indices from 0 to {depth - 1}, got {index!r}"
                )
        self.window = _checks.integer("window", window, 1)
        self.scale = _checks.one_of("scale", scale, SCALES)
        self.vit = _without_class_token(vit)
        self.out_channels = vit.num_features

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute the map after the last norm.

        Args:
            x: Images (B, 3, X, Y) of any size; padded to whole patches on the right and below.
            positions: Coordinates of the patches, (T, 2) or (B, T, 2), for rotations and absolute
                positions; by default the patch centres.

        Returns:
            (B, C, H, W).
        """
        vit = self.vit
        if x.ndim != 4 or x.shape[1] != vit.patches.in_chans:
            raise ValueError(
                f"x: expected images (B, {vit.patches.in_chans}, X, Y), got {tuple(x.shape)}"
            )
        grid = self.grid_shape(x.shape[2:])
        if positions is None:
            relative, rotated = (self._centers(x, scale) for scale in ("relative", self.scale))
        elif positions.shape[-2] == math.prod(grid):
            relative = rotated = positions
        else:
            raise ValueError(
                f"positions: expected {math.prod(grid)} rows, one per patch, "
                f"got {positions.shape[-2]}"
            )
        if vit.axis_scale is not None:
            factors = constants_like(vit.axis_scale, rotated)
            relative, rotated = relative * factors, rotated * factors
        x = vit.patches(self._padded(x, grid)).to(vit.norm.weight.dtype)
        if vit.ape is not None:
            x = x + vit.ape(relative)
        in_windows = partial(windowed_attention, grid=grid, window=self.window)
        attend = [
            attend_to_all if index in self.global_blocks else in_windows
            for index in range(len(vit.blocks))
        ]
        x = vit.apply_blocks(x, rotated, attend=attend)
        return vit.norm(x).mT.unflatten(2, grid)

    def grid_shape(self, canvas: Sequence[int]) -> tuple[int, int]:
        """Return the number of patches along each axis that cover a canvas."""
        sizes = zip(canvas, self.vit.patches.patch_size, strict=True)
        rows, columns = (-(-size // patch) for size, patch in sizes)
        return rows, columns

    def _padded(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        sizes = zip(x.shape[2:], grid, self.vit.patches.patch_size, strict=True)
        below, right = (number * patch - size for size, number, patch in sizes)
        return nn.functional.pad(x, (0, right, 0, below)) if below or right else x

    def _centers(self, x: Tensor, scale: str) -> Tensor:
        """Return the patch centres (T, 2). The canvas is [0, 1], and padding lies outside of it."""
        canvas, patch = x.shape[2:], self.vit.patches.patch_size
        unit: Sequence[float] = self.vit.train_grid  # patches per length of one
        if scale == "relative":
            unit = [size / side for size, side in zip(canvas, patch, strict=True)]
        grid = self.grid_shape(canvas)
        extent = [number / one for number, one in zip(grid, unit, strict=True)]
        return coordinates.grid(grid, scale=extent, device=x.device)


def check_images(vit: ViT) -> None:
    """Raise unless ``vit`` is a ViT for images."""
    if not isinstance(vit, ViT):
        raise TypeError(f"vit: expected a ViT, got {type(vit).__name__}")
    if vit.num_axes != 2:
        raise ValueError(f"vit: expected 2 axes, those of an image, got {vit.num_axes}")


def _without_class_token(vit: ViT) -> ViT:
    """Remove the class token and the classifier of a ViT, in place."""
    vit.cls_token, vit.num_prefix_tokens = None, 0
    for rope in rotary_modules(vit).values():
        rope.num_prefix_tokens = 0
    vit.reset_classifier(0, "avg")
    vit._given["class_token"] = False  # saved and loaded without one
    return vit
