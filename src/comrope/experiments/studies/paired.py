"""Two rows of a table, seed by seed: what a seed does to both of them is not a difference."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Difference", "by_seed", "compare", "difference"]

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """Mean over seeds, and the interval that holds the true one with 95 % confidence."""

    mean: float
    low: float | None  # None of one seed, which has no spread
    high: float | None
    seeds: int

    @property
    def verdict(self) -> str:
        """What the interval allows to say."""
        if self.low is None or self.high is None:
            return "undecided"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "undecided"


def compare(mine: dict[str, Any], other: dict[str, Any], views: Sequence[str]) -> Difference | None:
    """How much better ``mine`` is on the mean over some views, or on one; None without a seed that
    both cells of a results.json have."""
    return difference(by_seed(mine, views), by_seed(other, views))


def difference(mine: dict[int, float], other: dict[int, float]) -> Difference | None:
    """Of numbers by seed, of the seeds that both have."""
    found = [value - other[seed] for seed, value in mine.items() if seed in other]
    if not found:
        return None
    mean = statistics.fmean(found)
    if len(found) == 1:
        return Difference(mean, None, None, 1)
    from scipy.stats import t

    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(found) - 1))
    reach *= statistics.stdev(found) / len(found) ** 0.5
    return Difference(mean, mean - reach, mean + reach, len(found))


def by_seed(cell: dict[str, Any], views: Sequence[str]) -> dict[int, float]:
    """The accuracy of every run of a cell: the mean over these views."""
    return {
        run["seed"]: statistics.fmean(run["top1"][view] for view in views) for run in cell["runs"]
    }
