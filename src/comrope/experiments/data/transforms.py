"""Transforms from images and clips to bytes: timm's, and copies of them for whole clips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["WholeClip", "evaluation_transform", "resized", "training_transform", "whole_clip"]

Pair = tuple[float, float]


def training_transform(
    shape: tuple[int, int, int],
    *,
    scale: Pair,
    ratio: Pair,
    hflip: float,
    color_jitter: float,
    auto_augment: str | None,
    interpolation: str,
    mean: Sequence[float],
    std: Sequence[float],
) -> Any:
    """Return timm's random training transform, from an image to bytes (C, H, W).

    Args:
        shape: (C, H, W) of the result.
        scale, ratio: Of the random crop: its share of the area, and its width by its height.
        hflip: Probability of a horizontal flip.
        color_jitter: Strength of color jitter, 0 for none.
        auto_augment: timm's name of a policy.
        interpolation: "bilinear", "bicubic" or "random".
        mean, std: Per channel in [0, 1]; some policies fill with the mean.
    """
    from timm.data import create_transform

    return create_transform(
        shape,
        is_training=True,
        use_prefetcher=True,  # returns bytes, which are normalized on the device
        scale=scale,
        ratio=ratio,
        hflip=hflip,
        # timm would draw a jitter of 0, which has no effect.
        color_jitter=color_jitter or None,  # type: ignore[arg-type]
        auto_augment=auto_augment,
        interpolation=interpolation,
        mean=tuple(mean),
        std=tuple(std),
    )


def evaluation_transform(
    shape: tuple[int, int, int],
    *,
    interpolation: str,
    crop_pct: float,
    mean: Sequence[float],
    std: Sequence[float],
) -> Any:
    """Return timm's evaluation transform, from an image to bytes (C, H, W) of its center crop.

    Args:
        shape: (C, H, W) of the result.
        interpolation: As in training; "random" becomes "bicubic".
        crop_pct: Side of the crop divided by the shorter side of the image.
        mean, std: Per channel in [0, 1].
    """
    from timm.data import create_transform

    return create_transform(
        shape,
        use_prefetcher=True,
        interpolation=interpolation.replace("random", "bicubic"),
        mean=tuple(mean),
        std=tuple(std),
        crop_pct=crop_pct,
    )


class WholeClip:
    """One of the two transforms above for all frames at once, with one draw for all."""

    def __init__(self, steps: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.steps = steps

    def __call__(self, frames: Sequence[np.ndarray]) -> Tensor:
        """Return frames of one size, (H, W) or (H, W, C), as bytes (C, T, H, W)."""
        pixels = torch.from_numpy(np.stack(frames))
        # Channels last in memory, which torch resizes twice as fast.
        clip = pixels.view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)  # (T, C, H, W)
        for step in self.steps:
            clip = step(clip)
        return clip.transpose(0, 1)


def whole_clip(transform: Any) -> WholeClip | None:
    """Return the same transform for whole clips, up to rounding.

    Return None if one of its steps requires Pillow's images, as auto-augment does.
    """
    steps = [_on_tensors(step) for step in transform.transforms]
    return None if None in steps else WholeClip([step for step in steps if step is not None])


def _on_tensors(step: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a step of a transform for tensors (..., C, H, W), or None if that is impossible."""
    from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation
    from torchvision import transforms

    take_tensors = (
        transforms.RandomHorizontalFlip,
        transforms.CenterCrop,
        transforms.ColorJitter,
        MaybePILToTensor,
    )
    if isinstance(step, take_tensors):
        return step
    # Bicubic exceeds white, and Pillow clips after one axis, whose order torch cannot reproduce.
    if getattr(step, "interpolation", None) != transforms.InterpolationMode.BILINEAR:
        return None
    if isinstance(step, RandomResizedCropAndInterpolation):
        return RandomCrop(step)
    return Resize(step) if isinstance(step, transforms.Resize) else None


class Resize:
    """torchvision's resize from bytes to bytes; its own would return floating point."""

    def __init__(self, step: Any) -> None:
        self.size = step.size

    def __call__(self, clip: Tensor) -> Tensor:
        return resized(clip, self.size)


class RandomCrop:
    """timm's random resized crop, with the same draw."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, clip: Tensor) -> Tensor:
        step = self.step
        top, left, height, width = step.get_params(clip, step.scale, step.ratio)
        return resized(clip[..., top : top + height, left : left + width], step.size)


def resized(clip: Tensor, size: int | Sequence[int]) -> Tensor:
    """Resize bytes (..., C, H, W) bilinearly, equal to Pillow's result up to rounding.

    Args:
        clip: The pixels.
        size: Height and width, or the shorter side.
    """
    from torchvision.transforms.v2.functional import resize_image

    return resize_image(clip, [size] if isinstance(size, int) else [*size], antialias=True)
