"""Does a model see which way time goes? Clips of two classes, and the same clips played backwards,
each of which shows the other class."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.figures import new_figure
from comrope.experiments.studies.markdown import label, number, rows, spread, spread_said
from comrope.experiments.studies.paper.video import over_control, pair_of, style_of, told_apart

__all__ = ["figure", "table"]

WAYS = ("forwards", "backwards", "both")


def table(results: dict[str, Any]) -> str:
    pair = _pair(results)
    lines = [
        [label(cell), *(number(spread(found), 1) for found in _ways(cell, pair).values())]
        for cell in results["cells"]
    ]
    return (
        f"Clips of {' and '.join(pair)} that were taken for one of them: how many for the right "
        "one, %. *Backwards*: the same clips from their last frame to their first, each of which "
        "now shows the other class; none was turned in training. *Both*: together; without the "
        "order of frames a clip and its reversal are one, and that is 50.\n\n"
        + rows(["method", *WAYS], lines)
        + over_control("Both ways", results["cells"], lambda run: _of_run(run, pair)["both"])
    )


def figure(results: dict[str, Any]) -> Any:
    """A line a method: a mark for either way, with the spread over seeds."""
    pair, cells = _pair(results), results["cells"]
    drawing, axes = new_figure(1, width=7.2, height=4.2)
    axis = axes[0, 0]
    for row, cell in enumerate(cells):
        style = {**style_of(cell), "linestyle": "none", "label": None}
        for way, found in _ways(cell, pair).items():
            if way == "both":
                continue
            shown, place = spread(found), row + (0.15 if way == "backwards" else -0.15)
            axis.errorbar(shown["mean"], place, xerr=shown["std"], capsize=3, ms=7, **style)
    axis.axvline(50, color="0.6", linewidth=1, linestyle=":")
    axis.set(xlabel=f"{' and '.join(pair)} told apart, %", ylim=(len(cells) - 0.5, -0.5))
    axis.set_yticks(range(len(cells)), [label(cell).split(" (")[0] for cell in cells])
    axis.grid(alpha=0.25, axis="x")
    told = spread_said(results, "bar")
    told = f"{told}; " if told else ""
    drawing.suptitle(
        f"{results['data']}\n{told}above: forwards, below: backwards; dotted: chance", fontsize=10
    )
    return drawing


def _pair(results: dict[str, Any]) -> tuple[str, str]:
    pair = pair_of(results["cells"][0]["runs"][0]["classes"])
    assert pair is not None  # looked for before anything is measured
    return pair


def _ways(cell: dict[str, Any], pair: tuple[str, str]) -> dict[str, list[float]]:
    """A number a seed."""
    found = [_of_run(run, pair) for run in cell["runs"]]
    return {way: [each[way] for each in found] for way in WAYS}


def _of_run(run: dict[str, Any], pair: tuple[str, str]) -> dict[str, float]:
    """What is seen backwards is counted as what it then shows."""
    there = {"classes": run["classes"], "taken_for": run["both_ways"]["forwards"]}
    back = {"classes": run["classes"], "taken_for": _exchanged(run, pair)}
    counted = ((there,), (back,), (there, back))
    return {way: told_apart(pair, *some) for way, some in zip(WAYS, counted, strict=True)}


def _exchanged(run: dict[str, Any], pair: tuple[str, str]) -> list[list[int]]:
    counts = list(run["both_ways"]["backwards"])
    first, second = map(run["classes"].index, pair)
    counts[first], counts[second] = counts[second], counts[first]
    return counts
