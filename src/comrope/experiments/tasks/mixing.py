"""Augmentation of batches (mixup, CutMix, random erasing), and the loss of mixed targets."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Augment

__all__ = ["MixAndSmooth"]


class MixAndSmooth:
    """Mixup, CutMix, random erasing and label smoothing, and the loss of such targets."""

    def __init__(self, augment: Augment, num_classes: int) -> None:
        self.smoothing, self.erasing = augment.smoothing, augment.erase
        self.mixup: Any = None
        if augment.mixup or augment.cutmix:
            from timm.data import Mixup

            self.mixup = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                label_smoothing=augment.smoothing,
                num_classes=num_classes,
            )

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (B, C, ...) and targets, classes (B,) or probabilities (B, classes)."""
        if self.erasing:
            from timm.data.random_erasing import RandomErasing

            images = RandomErasing(self.erasing, mode="pixel", device=images.device)(images)
        if self.mixup is not None:
            if len(images) % 2:
                raise UserError(
                    "augment.mixup: needs an even number of images per process and part, because "
                    f"images are mixed in pairs; got {len(images)}"
                )
            images, targets = self.mixup(images, targets)
        return images, targets

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (B, classes)."""
        smoothing = 0.0 if self.mixup is not None else self.smoothing  # in the targets already
        return nn.functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
