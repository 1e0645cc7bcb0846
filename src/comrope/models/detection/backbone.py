"""A ViT as the backbone of a detector: a map of features, attention in windows, weights of timm.

Shapes: B batch, H x W patches, T = H W, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comrope import _checks
from comrope import positions as coordinates
from comrope._dtypes import constants_like
from comrope.analysis import rotary_modules
from comrope.models.detection.pyramid import windowed_attention
from comrope.models.embeddings import AbsolutePositions
from comrope.models.vit import ViT

__all__ = ["Loaded", "PlainBackbone", "check_images", "load_timm_weights"]

SCALES = ("relative", "patch")


class PlainBackbone(nn.Module):
    """A ViT as a feature map (B, 3, X, Y) to (B, C, H, W), as ViTDet makes it: most blocks attend
    in windows, a few globally.

    The coordinates of a patch are those it has in the whole image, in windows too: rotations happen
    before the map is cut. Windows that the map does not fill are smaller, so nothing is padded
    there and nothing has to be masked.

    Args:
        vit: The model, on two axes. It is taken over, not copied: its class token and classifier,
            which a map has no use for, are taken out.
        window: Patches along a side of a window.
        global_blocks: Indices of the blocks that attend globally, by default the last of every
            quarter of the depth.
        scale: What rotations count, for images of another size than ``vit`` was made for:
            ``"relative"``, the image is [0, 1] on each axis, as in the ViT itself; ``"patch"``,
            neighbouring patches are as far apart as they were there. The same at its own size.
            Absolute positions are relative always.
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
        """Images of any size, padded to whole patches on the right and below, to the map after the
        last norm. ``positions`` are those of the patches, (T, 2) or (B, T, 2), for rotations and
        absolute positions both, in place of the patch centres.
        """
        vit = self.vit
        if x.ndim != 4 or x.shape[1] != vit.patches.in_chans:
            raise ValueError(
                f"x: expected images (B, {vit.patches.in_chans}, X, Y), got {tuple(x.shape)}"
            )
        grid = self.grid_shape(x.shape[2:])
        if positions is None:
            relative, rotated = (self._centres(x, scale) for scale in ("relative", self.scale))
        elif positions.shape[-2] == math.prod(grid):
            relative = rotated = positions
        else:
            raise ValueError(
                f"positions: expected {math.prod(grid)} rows, one a patch, "
                f"got {positions.shape[-2]}"
            )
        if vit.axis_scale is not None:
            factors = constants_like(vit.axis_scale, rotated)
            relative, rotated = relative * factors, rotated * factors
        x = vit.patches(self._padded(x, grid)).to(vit.norm.weight.dtype)
        if vit.ape is not None:
            x = x + vit.ape(relative)
        in_windows = partial(windowed_attention, grid=grid, window=self.window)
        for index, angles in enumerate(vit._angles()):
            block = vit.blocks[index]
            windowed: dict[str, Any] = {"attend": in_windows}
            options = {} if index in self.global_blocks else windowed
            if vit.grad_checkpointing and self.training:
                x = checkpoint(block, x, rotated, angles, use_reentrant=False, **options)
            else:
                x = block(x, rotated, angles, **options)
        return vit.norm(x).mT.unflatten(2, grid)

    def grid_shape(self, canvas: Sequence[int]) -> tuple[int, int]:
        """Patches along each axis that cover a canvas."""
        sizes = zip(canvas, self.vit.patches.patch_size, strict=True)
        rows, columns = (-(-size // patch) for size, patch in sizes)
        return rows, columns

    def _padded(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        sizes = zip(x.shape[2:], grid, self.vit.patches.patch_size, strict=True)
        below, right = (number * patch - size for size, number, patch in sizes)
        return nn.functional.pad(x, (0, right, 0, below)) if below or right else x

    def _centres(self, x: Tensor, scale: str) -> Tensor:
        """(T, 2). A canvas that ends within a patch is [0, 1] for all that, the padding beyond."""
        canvas, patch = x.shape[2:], self.vit.patches.patch_size
        unit: Sequence[float] = self.vit.train_grid  # patches to a length of one
        if scale == "relative":
            unit = [size / side for size, side in zip(canvas, patch, strict=True)]
        grid = self.grid_shape(canvas)
        extent = [number / one for number, one in zip(grid, unit, strict=True)]
        return coordinates.grid(grid, scale=extent, device=x.device)


def check_images(vit: ViT) -> None:
    """Raise unless it is a ViT of images."""
    if not isinstance(vit, ViT):
        raise TypeError(f"vit: expected a ViT, got {type(vit).__name__}")
    if vit.num_axes != 2:
        raise ValueError(f"vit: expected 2 axes, those of an image, got {vit.num_axes}")


def _without_class_token(vit: ViT) -> ViT:
    """The same ViT as if it had been made without class token and classifier."""
    vit.cls_token, vit.num_prefix_tokens = None, 0
    for rope in rotary_modules(vit).values():
        rope.num_prefix_tokens = 0
    vit.reset_classifier(0, "avg")
    vit._given["class_token"] = False  # so that it can be saved and loaded as it is now
    return vit


class Loaded(NamedTuple):
    """What ``load_timm_weights`` could not use, by timm's names, and what it left as it was."""

    left_out: tuple[str, ...]
    new: tuple[str, ...]


@torch.no_grad()
def load_timm_weights(vit: ViT, state_dict: Mapping[str, Tensor]) -> Loaded:
    """Fill a ViT with the weights of timm's ``vision_transformer`` of the same sizes.

    Absolute positions of another grid are interpolated, as the ViT does it for another image; the
    position that timm adds to the class token becomes part of it. A classifier for another number
    of classes is left out. ``new`` are the angles, and whatever else timm's model does not have.
    """
    check_images(vit)
    given, own = dict(state_dict), vit.state_dict()
    loaded, left_out = {}, []
    place = given.get("pos_embed")  # (1, [1 +] T, C)
    if place is not None:
        grid, prefix = _pretraining_grid(place.shape[1], vit.train_grid, "cls_token" in given)
        if prefix:
            given["cls_token"] = given["cls_token"] + place[:, :1]
        if vit.ape is not None:
            known = AbsolutePositions(grid, place.shape[2]).to(place)
            known.codebook.copy_(place[0, prefix:])
            given["ape.codebook"] = known(coordinates.grid(vit.train_grid, device=place.device))
            del given["pos_embed"]
    for name, tensor in given.items():
        target = _our_name(name)
        if target == "patches.proj.weight":
            tensor = tensor.flatten(1)
        wrong_head = target.startswith("head.") and own.get(target, tensor).shape != tensor.shape
        if target not in own or wrong_head:
            left_out.append(name)
        elif own[target].shape != tensor.shape:
            raise ValueError(
                f"state_dict: expected {name} to fill {target} {tuple(own[target].shape)}, "
                f"got {tuple(state_dict.get(name, tensor).shape)}"
            )
        else:
            loaded[target] = tensor
    vit.load_state_dict(loaded, strict=False)
    return Loaded(tuple(left_out), tuple(name for name in own if name not in loaded))


def _our_name(name: str) -> str:
    """Of a weight of timm."""
    for theirs, ours in (
        ("patch_embed.", "patches."),
        (".ls1.", ".scale1."),
        (".ls2.", ".scale2."),
    ):
        name = name.replace(theirs, ours)
    return name


def _pretraining_grid(
    rows: int, grid: Sequence[int], class_token: bool
) -> tuple[tuple[int, ...], int]:
    """The grid of so many absolute positions, and how many come before those of the patches.

    That of the ViT if the number fits, else a square.
    """
    for prefix in (1, 0) if class_token else (0,):
        patches = rows - prefix
        side = math.isqrt(patches)
        if patches == math.prod(grid):
            return tuple(grid), prefix
        if side * side == patches:
            return (side, side), prefix
    raise ValueError(
        f"state_dict: expected pos_embed of {tuple(grid)} or square many patches, with or without "
        f"a class token, got {rows} rows"
    )
