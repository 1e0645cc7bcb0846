"""Sec. 4.3.3: strengths of the perturbation, each compared with none."""

from __future__ import annotations

from comrope.experiments.studies.fair.rows import tuned
from comrope.experiments.studies.paper.block_size import Sweep, sweep_figure, sweep_table
from comrope.experiments.studies.study import Preset, Row, Study

__all__ = ["STUDY"]

SWEEP = Sweep("perturbation", "σ", "σ = {:g}")


def rows(preset: Preset) -> list[Row]:
    sigmas = (0.0, 0.25, 0.5, 0.75, 1.0)
    return [tuned(Row(m, sigma), preset) for m in ("ape", "comrope-ld") for sigma in sigmas]


STUDY = Study(
    name="perturbation",
    title="Perturbation intensity",
    where="Sec. 4.3.3",
    rows=rows,
    table=lambda results: sweep_table(results, SWEEP),
    figure=lambda results: sweep_figure(results, SWEEP),
)
