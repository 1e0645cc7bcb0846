"""Judge the samples of a source of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from comrope.experiments.data.batches import Key
from comrope.experiments.data.datasets import ImageDataset
from fuzz.judge import require

__all__ = ["judge_samples"]

CLASSES = 10
MOST = 20  # samples of an input


def to_bytes(image: Any) -> torch.Tensor:
    """Return an image as bytes (C, H, W)."""
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


def judge_samples(source: Any, file: Path) -> dict[int, int]:
    """Load the samples of a source as training does; return the classes of those that are read.

    Args:
        source: An ``ImageSource`` of RGB images.
        file: The file that the message for an unreadable sample must contain.
    """
    targets = {}
    stop = ImageDataset(source, to_bytes, seed=0, num_classes=CLASSES)
    skip = ImageDataset(source, to_bytes, seed=0, num_classes=CLASSES, skip=True)
    for number in range(min(MOST, len(source))):
        name = source.name(number)
        require(name.isprintable(), "control characters in a name", repr(name))
        item = stop[Key(0, number, number)]
        require(item.image.ndim == 3 and item.image.shape[0] == 3, "silent: no image")
        if item.fatal is None:
            targets[number] = item.target
            continue
        require(str(file) in item.fatal, "an unreadable sample without its file", item.fatal)
        require(item.fatal.isprintable(), "several lines for an unreadable sample", item.fatal)
        skipped = skip[Key(0, number, number)]
        require(len(skipped.unreadable) == 1 and skipped.target < 0, "silent: a skipped sample")
    return targets
