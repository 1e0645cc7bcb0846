"""Tab. 6: the distribution of the elements of the angle matrices after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.config import Config
from comrope.experiments.inspect import angle_elements, histogram
from comrope.experiments.studies.paper.block_size import rows
from comrope.experiments.studies.study import Measurement, Results, Study, method_label
from comrope.experiments.studies.tables import format_mean, markdown_table, row_label
from comrope.experiments.training.evaluate import load_run

__all__ = ["STUDY"]


def element_statistics(_: Config, folder: Path) -> dict[str, Any]:
    """Return the standard deviation and histogram of the elements of all angle matrices."""
    elements = angle_elements(load_run(folder)[1])
    return {"std": float(elements.std()), "histogram": histogram(elements)}


def table(results: Results) -> str:
    paper = results["paper"]["distribution"]
    lines = [
        [
            row_label(row),
            str(row["block_size"]),
            format_mean(row["std"], 3),
            f"{paper['std'][row['method']][str(row['block_size'])]:.3f}",
        ]
        for row in results["rows"]
    ]
    header = ["method", "block", "ours", f"paper ({paper['data']})"]
    return (
        "Standard deviation of the elements above the diagonals of all angle matrices after "
        f"training.\n\n{markdown_table(header, lines)}"
    )


def figure(results: Results) -> Any:
    """Draw histograms of the first seed: one column per block size, linear above logarithmic."""
    sizes = sorted({row["block_size"] for row in results["rows"]})
    drawing, axes = new_figure(len(sizes), 2, height=3.2)
    for column, size in enumerate(sizes):
        for row in (r for r in results["rows"] if r["block_size"] == size):
            shape = row["runs"][0]["histogram"]
            edges = np.array(shape["edges"])
            centers, color = (edges[1:] + edges[:-1]) / 2, style_of(row["method"])["color"]
            label = f"{method_label(row['method'])}, std {row['std']['mean']:.2f}"
            for axis in axes[:, column]:
                axis.step(centers, shape["density"], where="mid", color=color, label=label)
        axes[0, column].set_title(f"blocks of {size}", fontsize=11)
        axes[0, column].legend(frameon=False, fontsize=8)
        axes[1, column].set(yscale="log", xlabel="element of an angle matrix")
    axes[0, 0].set_ylabel("density")
    axes[1, 0].set_ylabel("density, logarithmic")
    drawing.suptitle(f"Angle matrices after training (one seed)\n{results['data']}", fontsize=11)
    return drawing


STUDY = Study(
    name="distribution",
    title="Distribution of the angles",
    where="Tab. 6",
    rows=rows,
    measurement=Measurement("angles", element_statistics, averaged=("std",)),
    table=table,
    figure=figure,
)
