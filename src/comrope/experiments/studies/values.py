"""What rotating values adds: every row beside itself without, and ours beside the baselines."""

from __future__ import annotations

from typing import Any

from comrope.experiments.studies import comparison
from comrope.experiments.studies.comparison import Pair, paired

__all__ = ["figure", "pairs", "table"]


def pairs(results: dict[str, Any]) -> list[Pair]:
    """First with values over without, then ours over baselines that have them too, or not either:
    what values add is no merit of a method."""
    cells = results["cells"]
    added = [
        paired(results, mine, other)
        for mine in cells
        for other in cells
        if mine["method"] == other["method"] and mine["name"] and not other["name"]
    ]
    alike = [
        pair
        for pair in comparison.pairs(results)
        if bool(pair.mine["name"]) == bool(pair.other["name"])
    ]
    return [*added, *alike]


def table(results: dict[str, Any]) -> str:
    return (
        "*Values too*: besides queries and keys, values are rotated, and what attention makes of "
        f"them is rotated back.\n\n{comparison.table(results, pairs(results))}"
    )


def figure(results: dict[str, Any]) -> Any:
    return comparison.figure(results, pairs(results))
