"""One number of a method at several values, its blocks or its noise: each beside the least."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.figures import new_figure
from comrope.experiments.studies.markdown import (
    CAUTION,
    SEARCHED_WITH,
    all_share_noise,
    counts_of_seeds,
    interval,
    label,
    rows,
    spread_said,
    usual_size,
)
from comrope.experiments.studies.plots import resolutions
from comrope.experiments.studies.stats import compare
from comrope.experiments.studies.study import LABELS
from comrope.experiments.studies.tables import beside_the_papers

__all__ = ["figure", "table"]

# What a study changes, what a column of it is called, and what one value of it.
SWEPT = {
    "block-size": ("block_size", "block", "blocks of {:g}"),
    "perturbation": ("perturbation", "σ", "σ = {:g}"),
}


def table(results: dict[str, Any]) -> str:
    key, column, said = SWEPT[results["study"]]
    size, every = usual_size(results), [str(r) for r in results["resolutions"]]
    uneven = len(counts_of_seeds(results)) > 1
    alone = not all_share_noise(results)  # what is said of a row that shares its noise
    lines = []
    for cell in results["cells"]:
        least = min(_rows_of(results, cell["method"]), key=lambda other: other[key])
        if cell is not least:
            over = [compare(cell, least, views) for views in ([size], every)]
            both = [text for found in over for text in interval(found)]
            seeds = [str(over[1].seeds if over[1] else 0)] if uneven else []
            name = label(cell, settings=alone)
            lines.append([name, f"{cell[key]:g}", said.format(least[key]), *seeds, *both])
    header = ["method", column, "over", *(["seeds"] if uneven else [])]
    header += [f"{size} px", "", "mean over resolutions", ""]
    text = beside_the_papers(results, with_mean=True)
    searched = SEARCHED_WITH if any(cell["fields"] for cell in results["cells"]) else ""
    return f"{text}\n{CAUTION}{searched}{rows(header, lines)}" if lines else text


def figure(results: dict[str, Any]) -> Any:
    """One panel a method, one curve a value."""
    from matplotlib import colormaps

    key, _, said = SWEPT[results["study"]]
    methods = list(dict.fromkeys(cell["method"] for cell in results["cells"]))
    drawing, axes = new_figure(len(methods))
    for axis, method in zip(axes[0], methods, strict=True):
        cells = sorted(_rows_of(results, method), key=lambda cell: cell[key])

        def style(cell: dict[str, Any], number: int, count: int = len(cells)) -> dict[str, Any]:
            color = colormaps["viridis"](0.9 * number / max(count - 1, 1))
            return {"color": color, "marker": "osDv^"[number % 5], "label": said.format(cell[key])}

        if axis is not axes[0, 0]:
            axis.sharey(axes[0, 0])
        resolutions(axis, results, cells, style)
        axis.set_title(LABELS[method], fontsize=11)
        axis.legend(frameon=False, fontsize=9)
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    told = spread_said(results, "bands") or "one seed"
    drawing.suptitle(f"{results['title']}: {results['data']}\n{told}", fontsize=11)
    return drawing


def _rows_of(results: dict[str, Any], method: str) -> list[dict[str, Any]]:
    return [cell for cell in results["cells"] if cell["method"] == method]
