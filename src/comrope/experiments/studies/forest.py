"""A forest plot: differences and their intervals, one line a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from comrope.experiments.studies.stats import Difference

__all__ = ["Line", "draw_forest"]


class Line(NamedTuple):
    label: str
    style: dict[str, Any]
    trained: Difference | None  # at the training resolution
    mean: Difference | None  # of the mean over resolutions


def draw_forest(axis: Any, lines: Sequence[Line], size: str) -> None:
    """Of the mean over resolutions filled, at the training resolution hollow and below it."""
    for row, line in enumerate(lines):
        for found, place, face in zip(
            (line.mean, line.trained), (row - 0.15, row + 0.2), (None, "white"), strict=True
        ):
            if found is None:
                continue
            reach = None if found.high is None else found.high - found.mean
            style = {**line.style, "markerfacecolor": face or line.style["color"]}
            axis.errorbar(found.mean, place, xerr=reach, capsize=2, markersize=5, lw=1.2, **style)
    axis.axvline(0, color="0.3", linewidth=1)
    axis.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
    axis.set(xlabel=f"difference, points\nfilled: mean over resolutions, hollow: {size} px")
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.grid(alpha=0.25, axis="x")
