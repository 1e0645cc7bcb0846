"""The search for ``language``: the base of vanilla RoPE, and the rates of learned rotations."""

from __future__ import annotations

from typing import Any

import yaml

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.config import Config
from comrope.experiments.studies.fair.language import (
    DEMO,
    SCALES,
    learned_rows,
    rope_row,
    searched,
)
from comrope.experiments.studies.fair.language_pairs import BASE, METRIC
from comrope.experiments.studies.study import Preset, Results, Row, Study
from comrope.experiments.studies.tables import format_mean, markdown_table, row_name

__all__ = ["STUDY", "best"]

HELD_OUT = 0.1  # share of the training documents
BASES = (4.0, 8.0, 16.0, 60.0, 250.0, 1000.0, BASE)
RATES = (1.0, 3.0, 10.0, 30.0)
FEWER = {"small": ((16.0, 60.0, 250.0, 1000.0, BASE, 1e5), (0.2, 1.0, 5.0, 30.0))}  # by preset
RATE = "optim.angle_lr_scale"


def rows(preset: Preset) -> list[Row]:
    """Return a trial for every base, and for every rate of every row that learns.

    Learned rotations start from the usual base and from the best base that is stored.
    """
    fixed, rates = FEWER.get(preset.name, (BASES, RATES))
    bases = dict.fromkeys((BASE, searched(preset)["base"]))
    learned = [row for base in bases for row in learned_rows(base, {})]
    found = [
        *map(rope_row, fixed),
        *(row.with_fields({RATE: rate}) for row in learned for rate in rates),
    ]
    return [row.with_fields(DEMO) for row in found] if preset.name == "demo" else found


def settings(recipe: Config) -> dict[str, Any]:
    """Return the fields of all trials: held-out text, evaluated at the context of training."""
    return {"data.holdout": HELD_OUT, "language.lengths": (1.0,)}


def best(results: Results) -> dict[str, Any]:
    """Return the entry for language.yaml: the best base, and the best rate of every row."""
    ropes = [row for row in results["rows"] if row["method"] == "rope"]
    rates: dict[str, Results] = {}
    for row in results["rows"]:
        if row["method"] != "rope":
            name = row_name(row)
            rates[name] = min(rates.get(name, row), row, key=_bits)
    found: dict[str, Any] = {}
    if ropes:
        found["base"] = min(ropes, key=_bits)["fields"]["model.base"]
    found["rates"] = {name: row["fields"][RATE] for name, row in rates.items()}
    return found


def _bits(row: Results) -> float:
    (value,) = row[METRIC].values()
    return float(value["mean"])


def table(results: Results) -> str:
    lines = [
        [
            row_name(row),
            f"{row['fields'].get(RATE, '-')}",
            format_mean(next(iter(row[METRIC].values())), 3),
        ]
        for row in results["rows"]
    ]
    found = yaml.safe_dump({SCALES[results["preset"]].recipe: best(results)}, sort_keys=False)
    return (
        f"Bits per byte of {HELD_OUT:g} of the training documents, which were held out; lower is "
        f"better.\n\n{markdown_table(['row', 'angle rate', 'bits per byte'], lines)}\n"
        f"The best trials, as in `language.yaml`:\n\n```yaml\n{found}```\n"
    )


def figure(results: Results) -> Any:
    """Draw bits per byte against the base, and against the learning rate of the angles."""
    drawing, axes = new_figure(2, width=6.2, height=4.2)
    ropes = [row for row in results["rows"] if row["method"] == "rope"]
    title = "base of RoPE"
    if ropes:
        points = sorted((row["fields"]["model.base"], _bits(row)) for row in ropes)
        axes[0, 0].plot(*zip(*points, strict=True), **style_of("rope"))
        found, tried = best(results)["base"], [base for base, _ in points]
        edge = {tried[0]: ", the smallest tried", tried[-1]: ", the largest tried"}
        title = f"the best base is {found:,g}{edge.get(found, '')}"
    axes[0, 0].set_title(title, fontsize=10)
    by_name: dict[str, list[Results]] = {}
    for row in results["rows"]:
        if row["method"] != "rope":
            by_name.setdefault(row_name(row), []).append(row)
    for name, some in by_name.items():
        points = sorted((row["fields"][RATE], _bits(row)) for row in some)
        axes[0, 1].plot(*zip(*points, strict=True), label=name, **_style(some[0]))
    axes[0, 1].set_title("learned rotations; dashed: from the best base", fontsize=10)
    for axis, label in zip(
        axes[0], ("base of RoPE", "factor on the learning rate of the angles"), strict=True
    ):
        axis.set(xscale="log", xlabel=label, ylabel="bits per byte, held-out text")
        axis.grid(alpha=0.25)
    if by_name:
        drawing.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    drawing.suptitle(f"{results['data']}, one seed", fontsize=10)
    return drawing


def _style(row: Results) -> dict[str, Any]:
    """Return the method's colour; dashed for another start than the usual base, pale for shared."""
    return {
        **style_of(row["method"]),
        "linestyle": "-" if row["fields"].get("model.base", BASE) == BASE else "--",
        "alpha": 0.45 if "model.share_rotations" in row["fields"] else 1.0,
    }


STUDY = Study(
    name="language-search",
    title="Search for language modelling, on held-out text",
    task="language",
    scales=SCALES,
    seeds=lambda preset: 1,
    settings=settings,
    rows=rows,
    show_settings=False,  # the table has a column of them
    table=table,
    figure=figure,
)
