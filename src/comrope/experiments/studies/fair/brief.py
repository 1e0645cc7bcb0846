"""The comparison in one short table: every method without and with the extensions."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.figures import STYLES, new_figure
from comrope.experiments.studies.fair.comparison import how_much_added, more_over_less
from comrope.experiments.studies.fair.rows import ADDED, OURS
from comrope.experiments.studies.markdown import (
    all_share_noise,
    interval,
    label,
    named,
    number,
    over_views,
    rows,
    seeds_said,
    usual_size,
    validated_on,
)
from comrope.experiments.studies.stats import compare

__all__ = ["figure", "table"]

Cell = dict[str, Any]


def table(results: dict[str, Any]) -> str:
    """One row a method; also the differences of our extended method to each, where it exists."""
    pairs = _pairs(results)
    size, every = usual_size(results), [str(r) for r in results["resolutions"]]
    alone = not all_share_noise(results)

    def accuracy(cell: Cell | None) -> list[str]:
        if cell is None:
            return ["–", "–"]
        return [number(cell["top1"][size], 1), number(over_views(cell, every), 1)]

    header = ["method", f"{size} px", "mean", f"extended, {size} px", "extended, mean"]
    lines = [
        [label(cell, settings=alone), *accuracy(cell), *accuracy(more)] for cell, more in pairs
    ]
    told = _told(results, pairs)
    ours = next((more for cell, more in reversed(pairs) if more and cell["method"] in OURS), None)
    if ours is not None:
        header += ["difference", "difference, extended"]
        others = [cell if cell is not ours else None for pair in pairs for cell in pair]
        found = [None if cell is None else compare(ours, cell, every) for cell in others]
        said = [interval(each)[0] for each in found]
        lines = [[*line, *said[2 * i : 2 * i + 2]] for i, line in enumerate(lines)]
        told += (
            f" *Difference*: {named(ours).split(', ')[0]}, extended, minus the row, of the mean; "
            "paired by seed, with 95 % confidence intervals, not corrected for multiple tests."
        )
    missing = "; ".join(results.get("missing") or ())
    text = f"{told}\n\n{rows(header, lines)}"
    return f"{text}\nNot run yet: {missing}.\n" if missing else text


def figure(results: dict[str, Any]) -> Any:
    """The mean over resolutions, a row a method: without and with the extensions."""
    pairs, every = _pairs(results), [str(r) for r in results["resolutions"]]
    drawing, axes = new_figure(1, width=7.6, height=1.3 + 0.33 * len(pairs))
    axis = axes[0, 0]
    for row, pair in enumerate(pairs):
        for more, cell in enumerate(pair):
            if cell is None:
                continue
            found, style = over_views(cell, every), {**STYLES[cell["method"]], "linestyle": "none"}
            style |= {"markerfacecolor": "white"} if more else {}
            height = row if pair[1] is None else row - 0.15 + 0.3 * more
            axis.plot(found["values"], [height] * len(found["values"]), "|", color="0.4", ms=8)
            axis.errorbar(found["mean"], height, xerr=found["std"], capsize=3, ms=7, **style)
    axis.set_yticks(range(len(pairs)), [named(cell).split(" (")[0] for cell, _ in pairs])
    axis.set(xlabel="top-1 accuracy, %, mean over resolutions", ylim=(len(pairs) - 0.5, -0.5))
    axis.grid(alpha=0.25)
    axis.set_title(
        f"{results['data']}\n"
        "filled: alone; hollow: with rotated values, locality bias\n"
        "ticks: seeds; bars: ± one standard deviation",
        fontsize=10,
    )
    return drawing


def _pairs(results: dict[str, Any]) -> list[tuple[Cell, Cell | None]]:
    """Rows with perturbation and no extension, each with its extended row where there is one."""
    sigma = max(cell["perturbation"] for cell in results["cells"])
    cells = [c for c in results["cells"] if c["method"] == "none" or c["perturbation"] == sigma]
    more = more_over_less({**results, "cells": cells}, len(ADDED))
    with_more = {id(pair.other): pair.mine for pair in more}
    return [(cell, with_more.get(id(cell))) for cell in cells if not how_much_added(cell)]


def _told(results: dict[str, Any], pairs: list[tuple[Cell, Cell | None]]) -> str:
    """Describe what the numbers are."""
    cells = [cell for pair in pairs for cell in pair if cell is not None]
    sigma = max(cell["perturbation"] for cell in cells)
    seeds = seeds_said({"cells": cells})
    seeds = "One seed." if seeds == "one seed" else f"Mean ± standard deviation of {seeds}."
    return (
        f"Top-1 accuracy, %, {validated_on(results)}: {results['data']}, perturbation of the "
        f"coordinates σ = {sigma:g}. {seeds} *Mean*: over "
        f"{len(results['resolutions'])} resolutions. *Extended*: with rotated values and "
        "locality bias, which any rotation can have."
    )
