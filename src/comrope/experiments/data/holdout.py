"""Images held out of the training set, to choose settings without the validation set."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import derive

__all__ = ["Subset", "draw", "held_out"]


class Subset:
    """Some samples of another source.

    Args:
        source: The other source.
        chosen: Indices of the samples in the other source, (samples,).
    """

    def __init__(self, source: Any, chosen: np.ndarray) -> None:
        self.source, self.chosen = source, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def name(self, index: int) -> str:
        return str(self.source.name(int(self.chosen[index])))

    def load(self, index: int) -> Any:
        return self.source.load(int(self.chosen[index]))


def held_out(source: Any, share: float) -> tuple[Subset, Subset]:
    """Return the training part, and the held-out ``share`` of the samples for validation."""
    chosen = draw(len(source), share)
    return Subset(source, np.setdiff1d(np.arange(len(source)), chosen)), Subset(source, chosen)


def draw(count: int, share: float) -> np.ndarray:
    """Return the indices of the held-out samples, the same on every machine and for every seed.

    One sample is drawn from each of several ranges of equal length. So every class contributes its
    share if samples are ordered by class, as in folders.
    """
    wanted = round(share * count)
    if not 0 < wanted < count:
        raise UserError(
            f"data.holdout: expected a share with at least one of the {count} training images in "
            f"both parts, got {share:g}"
        )
    rng = random.Random(derive("holdout", count))
    edges = [k * count // wanted for k in range(wanted + 1)]
    return np.array([rng.randrange(*stretch) for stretch in itertools.pairwise(edges)])
