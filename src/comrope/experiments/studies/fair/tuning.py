"""The search before the comparison: every row's trials on held-out images, and the best of them."""

from __future__ import annotations

from typing import Any

import yaml

from comrope.experiments.common.figures import STYLES, new_figure
from comrope.experiments.studies.fair.rows import EVERY, ROWS, SEARCHED, full_rows, row_key
from comrope.experiments.studies.markdown import (
    fields_said,
    label,
    named,
    number,
    over_views,
    rows,
    seeds_said,
    usual_size,
    validated_on,
)
from comrope.experiments.studies.study import PRESETS, packaged

__all__ = ["best", "figure", "table"]

# What is no matter of a trial.
OF_ROWS = {row_key(row): dict(row.fields) for row in (*ROWS, *full_rows())}


def best(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields that tuned.yaml should have: of rows all of whose trials there are."""
    wanted, of_rows = packaged("fair/search.yaml"), _by_row(results)
    whole = {key: trials for key, trials in of_rows.items() if len(trials) == len(wanted[key])}
    found = {key: _winner(results, trials) for key, trials in whole.items()}
    common = _trial(found[SEARCHED]) if SEARCHED in found else {}
    own = {
        key: {name: value for name, value in _trial(cell).items() if name not in common}
        for key, cell in found.items()
        if key != SEARCHED
    }
    return {EVERY: common, **own} if common else own


def table(results: dict[str, Any]) -> str:
    size, every = usual_size(results), [str(r) for r in results["resolutions"]]
    lines = []
    for trials in _by_row(results).values():
        winner = _winner(results, trials)
        for cell in trials:
            mean = number(over_views(cell, every), 1)
            lines.append(
                [
                    label(cell),
                    fields_said(_tried(cell, trials)),
                    str(len(cell["runs"])),
                    number(cell["top1"][size], 1),
                    f"**{mean}**" if cell is winner else mean,
                ]
            )
    epochs = results["recipe"]["train"]["epochs"]
    found = yaml.safe_dump({PRESETS[results["preset"]].recipe: best(results)}, sort_keys=False)
    header = ["method", "trial", "seeds", f"{size} px", "mean over resolutions"]
    return (
        f"Top-1 accuracy, %, {validated_on(results)}, after {epochs} epochs. Bold: the best of a "
        "method so far, by the mean over resolutions; a trial that lacks seeds that others have "
        f"is not chosen.\n\n{rows(header, lines)}\nThe best of the methods that have all their "
        f"trials, as `tuned.yaml` has them:\n\n```yaml\n{found}```\n"
    )


def figure(results: dict[str, Any]) -> Any:
    """The mean over resolutions, a line a method, a mark a trial."""
    every, of_rows = [str(r) for r in results["resolutions"]], _by_row(results)
    drawing, axes = new_figure(1, width=7.6, height=4.4)
    axis = axes[0, 0]
    for row, trials in enumerate(of_rows.values()):
        winner = _winner(results, trials)
        for cell in trials:
            style = dict(STYLES[cell["method"]])
            if cell is not winner:
                style |= {"alpha": 0.45}
            axis.plot(over_views(cell, every)["mean"], row, linestyle="none", ms=8, **style)
    names = [named(trials[0]).split(" (")[0] for trials in of_rows.values()]
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="top-1 accuracy on held-out images, %, mean over resolutions")
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(alpha=0.25)
    told = f"{seeds_said(results)} a trial; pale: not the best"
    axis.set_title(f"{results['data']}\n{told}", fontsize=10)
    return drawing


def _by_row(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in results["cells"]:
        found.setdefault(cell["name"] or cell["method"], []).append(cell)
    return found


def _winner(results: dict[str, Any], trials: list[dict[str, Any]]) -> dict[str, Any]:
    """By the mean over resolutions; the first of those that are equal."""
    every, seeds = [str(r) for r in results["resolutions"]], max(len(c["runs"]) for c in trials)
    whole = [cell for cell in trials if len(cell["runs"]) == seeds]
    return max(whole, key=lambda cell: over_views(cell, every)["mean"])


def _trial(cell: dict[str, Any]) -> dict[str, Any]:
    """Its fields, but for those that its row has anyway."""
    own = OF_ROWS.get(cell["name"] or cell["method"], {})
    return {name: value for name, value in cell["fields"].items() if name not in own}


def _tried(cell: dict[str, Any], trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields in which the trials of its row differ."""
    every = [trial["fields"] for trial in trials]
    return {
        name: value
        for name, value in _trial(cell).items()
        if len(every) == 1 or any(name not in f or f[name] != value for f in every)
    }
