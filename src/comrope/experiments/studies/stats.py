"""Two rows of a table, seed by seed: what a seed does to both of them is not a difference."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Difference", "by_seed", "compare", "decided_together", "difference"]

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

    @property
    def chance(self) -> float:
        """Of a difference as large where there is none: the p-value of the paired t-test."""
        if self.low is None or self.high is None:
            return 1.0
        if self.high == self.low:
            return float(self.mean == 0)
        from scipy.stats import t

        error = (self.high - self.low) / 2 / _reach(self.seeds)
        return float(2 * t.sf(abs(self.mean) / error, self.seeds - 1))


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
    reach = _reach(len(found)) * statistics.stdev(found) / len(found) ** 0.5
    return Difference(mean, mean - reach, mean + reach, len(found))


def decided_together(found: Sequence[Difference | None]) -> list[bool]:
    """Which of them remain when all are asked at once, so that with 95 % confidence none of those
    is chance (Holm's correction): the surest first, held to the most."""
    order = sorted((each.chance, place) for place, each in enumerate(found) if each is not None)
    decided = [False] * len(found)
    for rank, (chance, place) in enumerate(order):
        if chance * (len(order) - rank) > 1 - CONFIDENCE:
            break
        decided[place] = True
    return decided


def _reach(seeds: int) -> float:
    """Of a confidence interval, in standard errors: Student's t."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, seeds - 1))


def by_seed(cell: dict[str, Any], views: Sequence[str]) -> dict[int, float]:
    """The accuracy of every run of a cell: the mean over these views."""
    return {
        run["seed"]: statistics.fmean(run["top1"][view] for view in views) for run in cell["runs"]
    }
