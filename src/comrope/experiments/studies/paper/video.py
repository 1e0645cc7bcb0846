"""Tab. 3: clips at other resolutions and lengths, and what only the order of frames tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from comrope.experiments.common.figures import new_figure
from comrope.experiments.studies.markdown import (
    CAUTION,
    interval,
    label,
    number,
    rows,
    spread,
    spread_said,
    usual_size,
)
from comrope.experiments.studies.plots import curve, of_method, resolutions
from comrope.experiments.studies.stats import compare, difference
from comrope.experiments.studies.tables import beside_the_papers

__all__ = [
    "REVERSED",
    "figure",
    "over_control",
    "pair_of",
    "style_of",
    "table",
    "told_apart",
]

# Classes of which one is the other, played backwards.
REVERSED = (("LeftSwipe", "RightSwipe"), ("left", "right"))


def table(results: dict[str, Any]) -> str:
    """By resolution as in two dimensions; then by the length of clips, and what only time tells."""
    clip = results["recipe"]["data"]["frames"]
    return (
        f"Clips of {clip} frames from all of a video, at other resolutions:\n\n"
        f"{beside_the_papers(results, 'video')}\n{_over_baselines(results)}Of other clips, at "
        f"{results['trained_at']} px. *Not told the time*: all frames have one time coordinate, so "
        f"that their order is lost.\n\n{_of_other_clips(results['cells'])}"
    )


def _over_baselines(results: dict[str, Any]) -> str:
    """Differences from APE and from vanilla RoPE with the same noise, seed by seed."""
    cells, sizes, size = results["cells"], [*map(str, results["resolutions"])], usual_size(results)
    wanted = (("ape", [size]), ("ape", sizes), ("rope", sizes))
    lines = []
    for cell in cells:
        sigma = cell["perturbation"]
        line = [label(cell), f"{sigma:g}"]
        for method, views in wanted:
            there = (c for c in cells if (c["method"], c["perturbation"]) == (method, sigma))
            other = next(there, cell)
            line += interval(None if other is cell else compare(cell, other, views))
        lines.append(line)
    if all(set(line[2:]) == {"–"} for line in lines):
        return ""
    mean = "mean over resolutions"
    header = ["method", "σ", f"over APE at {size} px", "", f"over APE, {mean}", ""]
    header += [f"over vanilla RoPE, {mean}", ""]
    return f"{CAUTION}{rows(header, lines)}\n"


def _of_other_clips(cells: list[dict[str, Any]]) -> str:
    others = [name for name in cells[0]["top1"] if not name.isdigit()]
    header = ["method", "σ", *others]
    lines = [
        [
            label(cell),
            f"{cell['perturbation']:g}",
            *(number(cell["top1"][name], 1) for name in others),
        ]
        for cell in cells
    ]
    classes = cells[0]["runs"][0].get("classes") or ()
    pair = pair_of(classes)
    if pair is not None and len(classes) > 2:  # of two, accuracy says it
        header.append(f"{' and '.join(pair)} told apart")
        lines = [
            [*line, number(spread([told_apart(pair, run) for run in cell["runs"]]), 1)]
            for line, cell in zip(lines, cells, strict=True)
        ]
        told = over_control("Told apart", cells, lambda run: told_apart(pair, run))
        return rows(header, lines) + told
    return rows(header, lines)


def over_control(
    what: str, cells: list[dict[str, Any]], measured: Callable[[dict[str, Any]], float]
) -> str:
    """How much better a model does something, by a number a run, than its like without time."""
    found = ""
    for control in (cell for cell in cells if cell["timeless"]):
        kind = (control["method"], control["perturbation"])
        for cell in cells:
            if (cell["method"], cell["perturbation"]) == kind and not cell["timeless"]:
                mine, other = (
                    {run["seed"]: measured(run) for run in each["runs"]} for each in (cell, control)
                )
                said, verdict = interval(difference(mine, other))
                found += f"\n{what}, {label(cell)} over {label(control)}: {said}, {verdict}.\n"
    return found


def pair_of(classes: Sequence[str] | None) -> tuple[str, str] | None:
    """Two classes that only the direction of time tells apart, if there are such."""
    return next((pair for pair in REVERSED if set(pair) <= set(classes or ())), None)


def told_apart(pair: tuple[str, str], *runs: dict[str, Any]) -> float:
    """Of the clips of two classes that were taken for one of them, how many for the right one, %;
    of some runs together."""
    right = wrong = 0
    for run in runs:
        first, second = map(run["classes"].index, pair)
        counts = run["taken_for"]
        right += counts[first][first] + counts[second][second]
        wrong += counts[first][second] + counts[second][first]
    return 100 * right / max(1, right + wrong)


def style_of(cell: dict[str, Any], _: int = 0) -> dict[str, Any]:
    """A method's colour and mark; hollow and dotted of one that is not told the time."""
    style = of_method(cell)
    if cell["timeless"]:
        style |= {"linestyle": ":", "label": label(cell), "markerfacecolor": "white"}
    return style


def figure(results: dict[str, Any]) -> Any:
    """Accuracy against resolution, against frames, and against the length of clips."""
    sigma = max(cell["perturbation"] for cell in results["cells"])
    cells = [cell for cell in results["cells"] if cell["perturbation"] == sigma]
    drawing, axes = new_figure(3, width=5.0)
    resolutions(axes[0, 0], results, cells, style_of)
    usual, clip = str(results["trained_at"]), results["recipe"]["data"]["frames"]
    lengths = {
        "frames of a clip": {**{n: f"{n} frames" for n in results["frames"]}, clip: usual},
        "share of the video that a clip is taken from": {
            **{s: f"{s:g} of the video" for s in results["spans"]},
            1.0: usual,
        },
    }
    for axis, (said, views) in zip(axes[0, 1:], lengths.items(), strict=True):
        xs = sorted(views)
        for cell in cells:
            if all(name in cell["top1"] for name in views.values()):
                curve(axis, xs, [cell["top1"][views[x]] for x in xs], **style_of(cell))
        axis.set(xlabel=said, xticks=xs)
        axis.grid(alpha=0.25)
        axis.sharey(axes[0, 0])
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    told = spread_said(results, "band")
    spread_told = f" ({told})" if told else ""
    drawing.suptitle(f"{results['data']}{spread_told}, perturbation {sigma:g}", fontsize=11)
    return drawing
