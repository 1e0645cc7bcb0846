"""What matters in a method: rows of the comparison, beside copies with one thing changed."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.figures import STYLES, new_figure
from comrope.experiments.studies.forest import Line, draw_forest
from comrope.experiments.studies.markdown import (
    CAUTION,
    interval,
    named,
    number,
    over_views,
    rows,
    seeds_said,
    usual_size,
    validated_on,
)
from comrope.experiments.studies.stats import Difference, compare

__all__ = ["figure", "table"]


def table(results: dict[str, Any]) -> str:
    size, every = usual_size(results), [str(r) for r in results["resolutions"]]
    header = ["", f"{size} px", "over it", "", "mean over resolutions", "over it", ""]
    lines = []
    for cell in results["cells"]:
        trained, mean = _over_it(results, cell)
        lines.append(
            [
                named(cell),
                number(cell["top1"][size], 1),
                *interval(trained),
                number(over_views(cell, every), 1),
                *interval(mean),
            ]
        )
    return (
        f"Top-1 accuracy, %, {validated_on(results)}. *It* is the method as in the comparison.\n\n"
        f"{CAUTION}{rows(header, lines)}"
    )


def figure(results: dict[str, Any]) -> Any:
    methods = list(dict.fromkeys(cell["method"] for cell in results["cells"]))
    drawing, axes = new_figure(len(methods), width=8.0, height=4.6)
    for axis, method in zip(axes[0], methods, strict=True):
        cells = [c for c in results["cells"] if c["method"] == method and c["name"]]
        style = {**STYLES[method], "linestyle": "none"}
        lines = [Line(_change(cell), style, *_over_it(results, cell)) for cell in cells]
        draw_forest(axis, lines, usual_size(results))
        axis.set_title(named({"method": method}).split(" (")[0], fontsize=11)
    seeds = seeds_said(results)
    told = seeds if seeds == "one seed" else f"{seeds}, 95 % intervals"
    drawing.suptitle(f"One thing changed: {results['data']}\n{told}", fontsize=11)
    return drawing


def _over_it(
    results: dict[str, Any], cell: dict[str, Any]
) -> tuple[Difference | None, Difference | None]:
    """From the method as it is, which has no name of its own: at the training resolution, and of
    the mean over resolutions."""
    cells = [c for c in results["cells"] if c["method"] == cell["method"] and not c["name"]]
    if not cells or not cell["name"]:
        return None, None
    every = [str(r) for r in results["resolutions"]]
    return compare(cell, cells[0], [usual_size(results)]), compare(cell, cells[0], every)


def _change(cell: dict[str, Any]) -> str:
    return str(cell["name"]).partition(", ")[2]
