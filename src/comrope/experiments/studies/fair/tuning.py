"""The search of settings for the comparison: trials of every row on held-out images."""

from __future__ import annotations

from typing import Any

import yaml

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.config import Config
from comrope.experiments.studies.fair.rows import (
    EVERY,
    ROWS,
    SEARCHED,
    extended_rows,
    row_id,
    tuned_for_all,
)
from comrope.experiments.studies.study import PRESETS, Preset, Results, Row, Study, packaged
from comrope.experiments.studies.tables import (
    describe_fields,
    describe_seeds,
    describe_validation,
    format_mean,
    markdown_table,
    mean_over_views,
    row_label,
    short_name,
    training_size,
)

__all__ = ["STUDY", "best"]

HELD_OUT = 0.2  # share of the training images
# Row id -> the fields of the row in every trial.
FIELDS = {row_id(row): dict(row.fields) for row in (*ROWS, *extended_rows())}


def rows(preset: Preset) -> list[Row]:
    """Return the trials of search.yaml."""
    trials, common = packaged("fair/search.yaml"), tuned_for_all(preset)
    return [
        row.with_fields(trial if row_id(row) == SEARCHED else {**common, **trial})
        for row in (*ROWS, *extended_rows())
        for trial in trials[row_id(row)]
    ]


def settings(recipe: Config) -> dict[str, Any]:
    """Return fields for shorter training on a part of the training images."""
    return {"data.holdout": HELD_OUT, "train.epochs": max(1, recipe.train.epochs // 2)}


def best(results: Results) -> dict[str, dict[str, Any]]:
    """Return the entries for tuned.yaml, for rows with all of their trials."""
    wanted, by_row = packaged("fair/search.yaml"), _by_row(results)
    complete = {key: trials for key, trials in by_row.items() if len(trials) == len(wanted[key])}
    found = {key: _winner(results, trials) for key, trials in complete.items()}
    common = _trial(found[SEARCHED]) if SEARCHED in found else {}
    own = {
        key: {name: value for name, value in _trial(row).items() if name not in common}
        for key, row in found.items()
        if key != SEARCHED
    }
    return {EVERY: common, **own} if common else own


def table(results: Results) -> str:
    size, every = training_size(results), [str(r) for r in results["resolutions"]]
    lines = []
    for trials in _by_row(results).values():
        winner = _winner(results, trials)
        for row in trials:
            mean = format_mean(mean_over_views(row, every), 1)
            lines.append(
                [
                    row_label(row),
                    describe_fields(_varied(row, trials)),
                    str(len(row["runs"])),
                    format_mean(row["top1"][size], 1),
                    f"**{mean}**" if row is winner else mean,
                ]
            )
    epochs = results["recipe"]["train"]["epochs"]
    found = yaml.safe_dump({PRESETS[results["preset"]].recipe: best(results)}, sort_keys=False)
    header = ["method", "trial", "seeds", f"{size} px", "mean over resolutions"]
    return (
        f"Top-1 accuracy, %, {describe_validation(results)}, after {epochs} epochs. Bold: the best "
        "trial of a method so far, by the mean over resolutions; a trial with fewer seeds than "
        f"others is not chosen.\n\n{markdown_table(header, lines)}\nThe best trials of methods "
        f"with all trials, as in `tuned.yaml`:\n\n```yaml\n{found}```\n"
    )


def figure(results: Results) -> Any:
    """Draw the mean over resolutions: one line per method, one marker per trial."""
    every, by_row = [str(r) for r in results["resolutions"]], _by_row(results)
    drawing, axes = new_figure(1, width=7.6, height=4.4)
    axis = axes[0, 0]
    for place, trials in enumerate(by_row.values()):
        winner = _winner(results, trials)
        for row in trials:
            style = dict(style_of(row["method"]))
            if row is not winner:
                style |= {"alpha": 0.45}
            axis.plot(mean_over_views(row, every)["mean"], place, linestyle="none", ms=8, **style)
    names = [short_name(trials[0]) for trials in by_row.values()]
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel="top-1 accuracy on held-out images, %, mean over resolutions")
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(alpha=0.25)
    note = f"{describe_seeds(results)} a trial; pale: not the best"
    axis.set_title(f"{results['data']}\n{note}", fontsize=10)
    return drawing


def _by_row(results: Results) -> dict[str, list[Results]]:
    found: dict[str, list[Results]] = {}
    for row in results["rows"]:
        found.setdefault(row["label"] or row["method"], []).append(row)
    return found


def _winner(results: Results, trials: list[Results]) -> Results:
    """Return the best trial by the mean over resolutions; the first if several are equal."""
    every, seeds = [str(r) for r in results["resolutions"]], max(len(r["runs"]) for r in trials)
    complete = [row for row in trials if len(row["runs"]) == seeds]
    return max(complete, key=lambda row: mean_over_views(row, every)["mean"])


def _trial(row: Results) -> dict[str, Any]:
    """Return the fields of a trial without those of all trials of its row."""
    own = FIELDS.get(row["label"] or row["method"], {})
    return {name: value for name, value in row["fields"].items() if name not in own}


def _varied(row: Results, trials: list[Results]) -> dict[str, Any]:
    """Return the fields in which the trials of a row differ."""
    every = [trial["fields"] for trial in trials]
    return {
        name: value
        for name, value in _trial(row).items()
        if len(every) == 1 or any(name not in f or f[name] != value for f in every)
    }


STUDY = Study(
    name="tuning",
    title="Trials of every position encoding, on images held out of training",
    seeds=lambda preset: 1,
    settings=settings,
    rows=rows,
    show_settings=False,  # the table has a column of them
    table=table,
    figure=figure,
)
