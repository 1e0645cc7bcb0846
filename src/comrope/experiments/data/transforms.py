"""What is done to the pixels of images and clips before a model sees them: timm's, and for a whole
clip at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comrope.experiments.config import Config
from comrope.experiments.tasks.views import View, resolution_of

__all__ = ["WholeClip", "evaluation_transform", "resized", "training_transform", "whole_clip"]


def training_transform(config: Config) -> Any:
    """From an image to bytes (C, H, W), drawn at random."""
    from timm.data import create_transform

    augment, data = config.augment, config.data
    return create_transform(
        (data.in_chans, *resolution_of(config)),
        is_training=True,
        use_prefetcher=True,  # leave the pixels as bytes: they are normalised on the device
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        # One of 0 would be drawn, to do nothing.
        color_jitter=augment.color_jitter or None,  # type: ignore[arg-type]
        auto_augment=augment.auto_augment,
        interpolation=augment.interpolation,
        mean=data.mean,
        std=data.std,
    )


def evaluation_transform(config: Config, view: View) -> Any:
    """From an image to bytes (C, H, W): its middle."""
    from timm.data import create_transform

    data, augment = config.data, config.augment
    return create_transform(
        (data.in_chans, view.resolution, view.resolution),
        use_prefetcher=True,
        interpolation=augment.interpolation.replace("random", "bicubic"),
        mean=data.mean,
        std=data.std,
        crop_pct=augment.crop_pct,
    )


class WholeClip:
    """One of the two above for all frames at once, by one draw: the one that each of them would
    get."""

    def __init__(self, steps: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.steps = steps

    def __call__(self, frames: Sequence[np.ndarray]) -> Tensor:
        """From frames of one size, (H, W) or (H, W, C), to bytes (C, T, H, W)."""
        pixels = torch.from_numpy(np.stack(frames))
        # The channels of a pixel stay side by side in memory: torch resizes that twice as fast.
        clip = pixels.view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)  # (T, C, H, W)
        for step in self.steps:
            clip = step(clip)
        return clip.transpose(0, 1)


def whole_clip(transform: Any) -> WholeClip | None:
    """The same for whole clips, up to rounding; None if one of its steps cannot be, for it knows
    Pillow's images only, as auto-augment does."""
    steps = [_on_tensors(step) for step in transform.transforms]
    return None if None in steps else WholeClip([step for step in steps if step is not None])


def _on_tensors(step: Any) -> Callable[[Tensor], Tensor] | None:
    """A step of a transform, for tensors (..., C, H, W)."""
    from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation
    from torchvision import transforms

    as_they_are = (
        transforms.RandomHorizontalFlip,
        transforms.CenterCrop,
        transforms.ColorJitter,
        MaybePILToTensor,
    )
    if isinstance(step, as_they_are):
        return step
    # Of bicubic, what is brighter than white is cut off after one axis: which, depends on Pillow.
    if getattr(step, "interpolation", None) != transforms.InterpolationMode.BILINEAR:
        return None
    if isinstance(step, RandomResizedCropAndInterpolation):
        return RandomCrop(step)
    return Resize(step) if isinstance(step, transforms.Resize) else None


class Resize:
    """torchvision's, of bytes: itself, it would make floating point of them."""

    def __init__(self, step: Any) -> None:
        self.size = step.size

    def __call__(self, clip: Tensor) -> Tensor:
        return resized(clip, self.size)


class RandomCrop:
    """timm's, by the same draw: a part of any place, size and ratio, resized."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, clip: Tensor) -> Tensor:
        step = self.step
        top, left, height, width = step.get_params(clip, step.scale, step.ratio)
        return resized(clip[..., top : top + height, left : left + width], step.size)


def resized(clip: Tensor, size: int | Sequence[int]) -> Tensor:
    """Bytes (..., C, H, W), bilinear, at another size or with another shorter side: what Pillow
    makes of each of them, up to rounding."""
    from torchvision.transforms.v2.functional import resize_image

    return resize_image(clip, [size] if isinstance(size, int) else [*size], antialias=True)
