"""Parts of figures: curves with their spread over seeds, and forest plots of differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from comrope.experiments.common.figures import style_of
from comrope.experiments.studies.stats import Difference
from comrope.experiments.studies.study import Results
from comrope.experiments.studies.tables import row_name

__all__ = ["Line", "accuracy_curves", "curve", "draw_forest", "method_style"]


def method_style(row: Results, _: int = 0) -> dict[str, Any]:
    """Return colour and marker of a row's method, and the row's name as label."""
    return {**style_of(row["method"]), "label": row_name(row)}


def curve(axis: Any, xs: list[float], spreads: list[dict[str, Any]], **style: Any) -> None:
    """Draw means against xs, with a band of one standard deviation."""
    means = np.array([s["mean"] for s in spreads])
    axis.plot(xs, means, linewidth=1.8, markersize=5, **style)
    if spreads[0]["std"] is not None:
        stds = np.array([s["std"] for s in spreads])
        axis.fill_between(xs, means - stds, means + stds, color=style["color"], alpha=0.15, lw=0)


def accuracy_curves(
    axis: Any, results: Results, rows: Sequence[Results], row_style: Callable[..., Any]
) -> None:
    """Draw accuracy against resolution: one curve per row, a line at the training resolution."""
    xs = results["resolutions"]
    for number, row in enumerate(rows):
        style = row_style(row, number)
        curve(axis, xs, [row["top1"][str(x)] for x in xs], **style)
    axis.axvline(results["trained_at"], color="0.8", zorder=0, linewidth=1)
    axis.set(xlabel="evaluation resolution, px", xticks=xs)
    axis.tick_params(axis="x", rotation=60)
    axis.grid(alpha=0.25)


class Line(NamedTuple):
    """One line of a forest plot."""

    label: str
    style: dict[str, Any]
    trained: Difference | None  # at the training resolution
    mean: Difference | None  # of the mean over resolutions


def draw_forest(axis: Any, lines: Sequence[Line], size: str) -> None:
    """Draw differences with intervals: filled over all resolutions, hollow at ``size`` px."""
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
