"""Sec. 4.3.2: block sizes, each compared with the smallest."""

from __future__ import annotations

from typing import Any, NamedTuple

from comrope.experiments.common.figures import new_figure
from comrope.experiments.studies.fair.rows import tuned
from comrope.experiments.studies.plots import accuracy_curves
from comrope.experiments.studies.stats import compare
from comrope.experiments.studies.study import Preset, Results, Row, Study, method_label
from comrope.experiments.studies.tables import (
    NOTE_INTERVALS,
    NOTE_SEARCH,
    describe_spread,
    format_difference,
    markdown_table,
    row_label,
    seed_counts,
    shares_perturbation,
    training_size,
    with_paper_table,
)

__all__ = ["STUDY", "Sweep", "rows", "sweep_figure", "sweep_table"]


class Sweep(NamedTuple):
    """One setting of a method at several values."""

    key: str  # in the rows of results.json
    column: str  # of the table
    value: str  # a format for one value


SWEEP = Sweep("block_size", "block", "blocks of {:g}")


def rows(preset: Preset) -> list[Row]:
    methods = ("liere", "comrope-ap", "comrope-ld")
    return [tuned(Row(m, block_size=b), preset) for m in methods for b in (2, 4, 8)]


def sweep_table(results: Results, sweep: Sweep) -> str:
    """Return accuracies, and the difference of every value from the method's smallest value."""
    size, every = training_size(results), [str(r) for r in results["resolutions"]]
    uneven = len(seed_counts(results)) > 1
    settings = not shares_perturbation(results)
    lines = []
    for row in results["rows"]:
        least = min(_rows_of(results, row["method"]), key=lambda other: other[sweep.key])
        if row is least:
            continue
        found = [compare(row, least, views) for views in ([size], every)]
        columns = [text for each in found for text in format_difference(each)]
        seeds = [str(found[1].seeds if found[1] else 0)] if uneven else []
        values = [f"{row[sweep.key]:g}", sweep.value.format(least[sweep.key])]
        lines.append([row_label(row, settings=settings), *values, *seeds, *columns])
    header = ["method", sweep.column, "compared with", *(["seeds"] if uneven else [])]
    header += [f"{size} px", "", "mean over resolutions", ""]
    text = with_paper_table(results, "classification", with_mean=True)
    searched = NOTE_SEARCH if any(row["fields"] for row in results["rows"]) else ""
    return f"{text}\n{NOTE_INTERVALS}{searched}{markdown_table(header, lines)}" if lines else text


def sweep_figure(results: Results, sweep: Sweep) -> Any:
    """Draw accuracy against resolution: one panel per method, one curve per value."""
    from matplotlib import colormaps

    methods = list(dict.fromkeys(row["method"] for row in results["rows"]))
    drawing, axes = new_figure(len(methods))
    for axis, method in zip(axes[0], methods, strict=True):
        some = sorted(_rows_of(results, method), key=lambda row: row[sweep.key])

        def style(row: Results, number: int, count: int = len(some)) -> dict[str, Any]:
            color = colormaps["viridis"](0.9 * number / max(count - 1, 1))
            label = sweep.value.format(row[sweep.key])
            return {"color": color, "marker": "osDv^"[number % 5], "label": label}

        if axis is not axes[0, 0]:
            axis.sharey(axes[0, 0])
        accuracy_curves(axis, results, some, style)
        axis.set_title(method_label(method), fontsize=11)
        axis.legend(frameon=False, fontsize=9)
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    spread = describe_spread(results, "bands") or "one seed"
    drawing.suptitle(f"{results['title']}: {results['data']}\n{spread}", fontsize=11)
    return drawing


def _rows_of(results: Results, method: str) -> list[Results]:
    return [row for row in results["rows"] if row["method"] == method]


STUDY = Study(
    name="block-size",
    title="Block size",
    where="Sec. 4.3.2",
    rows=rows,
    table=lambda results: sweep_table(results, SWEEP),
    figure=lambda results: sweep_figure(results, SWEEP),
)
