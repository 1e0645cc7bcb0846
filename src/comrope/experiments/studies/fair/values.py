"""What can be added to every rotation: each row beside itself without, ours beside baselines."""

from __future__ import annotations

from typing import Any

from comrope.experiments.studies.fair import comparison
from comrope.experiments.studies.fair.comparison import Pair, how_much_added

__all__ = ["figure", "pairs", "table"]


def pairs(results: dict[str, Any]) -> list[Pair]:
    """First more over less, then ours over baselines that have as much: what is added is no merit
    of a method."""
    alike = [
        pair
        for pair in comparison.ours_over_others(results)
        if how_much_added(pair.mine) == how_much_added(pair.other)
    ]
    return [*comparison.more_over_less(results, 1), *alike]


def table(results: dict[str, Any]) -> str:
    return comparison.table(results, pairs(results))


def figure(results: dict[str, Any]) -> Any:
    return comparison.figure(results, pairs(results))
