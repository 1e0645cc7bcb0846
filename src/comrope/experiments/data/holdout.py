"""Training images that are kept out of training, to choose by without the validation set."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import derive

if TYPE_CHECKING:
    from comrope.experiments.data.images import Source

__all__ = ["Part", "draw", "held_out"]


class Part:
    """Some images of another source."""

    def __init__(self, source: Source, chosen: np.ndarray) -> None:
        self.source, self.chosen = source, chosen  # (images,), their numbers there

    def __len__(self) -> int:
        return len(self.chosen)

    def name(self, index: int) -> str:
        return self.source.name(int(self.chosen[index]))

    def load(self, index: int) -> tuple[Image.Image, int]:
        return self.source.load(int(self.chosen[index]))


def held_out(source: Source, share: float) -> tuple[Source, Source]:
    """What is left to train on, and ``share`` of the images to validate with."""
    chosen = draw(len(source), share)
    return Part(source, np.setdiff1d(np.arange(len(source)), chosen)), Part(source, chosen)


def draw(count: int, share: float) -> np.ndarray:
    """Which of ``count`` images are held out: the same for every seed, process and machine.

    Of equal stretches one image each, so that of images that come class by class, as in folders,
    every class gives its share.
    """
    wanted = round(share * count)
    if not 0 < wanted < count:
        raise UserError(
            f"data.holdout: expected a share that leaves some of the {count} training images on "
            f"both sides, got {share:g}"
        )
    rng = random.Random(derive("holdout", count))
    edges = [k * count // wanted for k in range(wanted + 1)]
    return np.array([rng.randrange(*stretch) for stretch in itertools.pairwise(edges)])
