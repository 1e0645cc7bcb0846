"""Paired comparison of two rows: differences between runs of the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Difference", "by_seed", "compare", "difference", "holm"]

CONFIDENCE = 0.95
EQUAL = 1e-9  # differences whose range is below this are equal up to rounding


class Difference(NamedTuple):
    """Mean difference over seeds, its confidence interval and p-value (paired t-test)."""

    mean: float
    low: float | None  # None for one seed
    high: float | None
    seeds: int
    p_value: float = 1.0
    lower_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Return "better" or "worse" if the interval excludes zero, else "undecided"."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "undecided"
        return "better" if (self.mean < 0) == self.lower_is_better else "worse"


def compare(
    mine: dict[str, Any],
    other: dict[str, Any],
    views: Sequence[str],
    metric: str = "top1",
    *,
    lower_is_better: bool = False,
) -> Difference | None:
    """Return the difference of a metric, mean over views, between two rows of a results.json.

    Returns:
        The difference, or None if the rows have no seed in common.
    """
    found = difference(by_seed(mine, views, metric), by_seed(other, views, metric))
    return None if found is None else found._replace(lower_is_better=lower_is_better)


def difference(mine: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Return the difference of two sets of numbers by seed, over the seeds that both have."""
    seeds = [seed for seed in mine if seed in other]
    if not seeds:
        return None
    pairs = [(mine[seed], other[seed]) for seed in seeds]
    found = [a - b for a, b in pairs]
    mean = statistics.fmean(found)
    if len(found) == 1:
        return Difference(mean, None, None, 1)
    if max(found) - min(found) < EQUAL:
        return Difference(mean, mean, mean, len(found), float(abs(mean) < EQUAL))
    from scipy.stats import ttest_rel

    test = ttest_rel(*zip(*pairs, strict=True))
    low, high = test.confidence_interval(CONFIDENCE)
    return Difference(mean, float(low), float(high), len(found), float(test.pvalue))


def holm(found: Sequence[Difference | None]) -> list[bool]:
    """Return which differences are significant after Holm correction.

    With 95 % confidence, no difference without an effect is among them.
    """
    order = sorted((each.p_value, place) for place, each in enumerate(found) if each is not None)
    significant = [False] * len(found)
    for rank, (p_value, place) in enumerate(order):
        if p_value * (len(order) - rank) > 1 - CONFIDENCE:
            break
        significant[place] = True
    return significant


def by_seed(row: dict[str, Any], views: Sequence[str], metric: str = "top1") -> dict[int, float]:
    """Return a metric of every run of a row, mean over views, by seed."""
    return {
        run["seed"]: statistics.fmean(run[metric][view] for view in views) for run in row["runs"]
    }
