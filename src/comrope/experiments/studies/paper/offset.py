"""Sec. 4.3.1: accuracy when the coordinates of every image are shifted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comrope.experiments.common.figures import new_figure
from comrope.experiments.config import Config, commutes
from comrope.experiments.studies.fair.rows import tuned
from comrope.experiments.studies.measure import evaluating
from comrope.experiments.studies.plots import curve, method_style
from comrope.experiments.studies.study import Measurement, Preset, Results, Row, Study
from comrope.experiments.studies.tables import (
    describe_class_token,
    format_mean,
    markdown_table,
    row_label,
)
from comrope.experiments.tasks.base import Probe

__all__ = ["STUDY"]

RHOS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # as in the paper, in image widths


def rows(preset: Preset) -> list[Row]:
    """Return the rows of the comparison with perturbation, without extensions.

    Absolute positions are excluded, because they are not defined outside of the image.
    """
    return [tuned(Row(m), preset) for m in preset.methods if m != "ape"]


def accuracy_by_offset(config: Config, folder: Path) -> dict[str, Any]:
    """Return the accuracy at the training resolution for every rho."""
    if not commutes(config.model.position):  # one exponential per image, token, head and block
        smaller = max(1, config.evaluate.batch_size // 8)
        config = config.with_overrides({"evaluate.batch_size": smaller})
    with evaluating(config, folder) as evaluate:
        return {"offset": {f"{rho:g}": evaluate(Probe(offset=rho))["top1"] for rho in RHOS}}


def table(results: Results) -> str:
    rhos = [*results["rows"][0]["offset"]]
    lines = []
    for row in results["rows"]:
        changes = [run["offset"][rho] - run["offset"]["0"] for run in row["runs"] for rho in rhos]
        name = f"{row_label(row)}{describe_class_token(row)}"
        means = (format_mean(row["offset"][rho]) for rho in rhos)
        lines.append([name, *means, f"{max(map(abs, changes)):.2f}"])
    header = ["method", *(f"ρ = {rho}" for rho in rhos), "largest change"]
    return (
        f"Top-1 accuracy, %, at {results['trained_at']} px, when the coordinates of every image "
        "are moved by N(0, ρ²) image widths. *Largest change*: in points, over all ρ and seeds."
        f"\n\n{markdown_table(header, lines)}"
        "\nThe paper shows this as a figure without numbers: LieRE decays, ComRoPE stays.\n"
    )


def figure(results: Results) -> Any:
    """Draw accuracy against rho, one curve per row."""
    drawing, axes = new_figure(1, width=7.0)
    axis = axes[0, 0]
    for row in results["rows"]:
        style = method_style(row)
        style["label"] += describe_class_token(row)
        curve(axis, [float(rho) for rho in row["offset"]], [*row["offset"].values()], **style)
    axis.set(xlabel="ρ, image widths", ylabel="top-1 accuracy, %")
    title = "Accuracy when the coordinates of every image are moved by N(0, ρ²)"
    axis.set_title(f"{title}\n{results['data']}", fontsize=10)
    axis.grid(alpha=0.25)
    drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return drawing


STUDY = Study(
    name="offset",
    title="Accuracy when the coordinates are moved",
    where="Sec. 4.3.1",
    rows=rows,
    measurement=Measurement(
        "offset", accuracy_by_offset, needs_data=True, key={"rho": [*RHOS]}, averaged=("offset",)
    ),
    table=table,
    figure=figure,
)
