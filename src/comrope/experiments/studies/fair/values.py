"""The extensions one by one: every rotation without, with rotated values, and with both."""

from __future__ import annotations

from typing import Any

from comrope.experiments.studies.fair.comparison import figure_of, table_of
from comrope.experiments.studies.fair.pairs import (
    Pair,
    extension_pairs,
    num_extensions,
    ours_vs_baselines,
)
from comrope.experiments.studies.fair.rows import (
    EXTENDABLE,
    extended_fields,
    extended_label,
    more_seeds,
)
from comrope.experiments.studies.study import Preset, Results, Row, Study, method_label
from comrope.methods import method_class

__all__ = ["STUDY", "pairs"]

# All rotations start with the same frequencies.
START: dict[str, Any] = {"model.init": "rope-random-axes", "model.base": 100.0}


def rows(preset: Preset) -> list[Row]:
    """Return three rows for each rotation, without a search."""
    found = []
    for method in (m for m in EXTENDABLE if m in preset.methods):
        learns = method_class(method).learns
        start = {name: v for name, v in START.items() if learns or name != "model.init"}
        plain = Row(method).with_fields(start)
        label = f"{method_label(method, short=True)}, rotated values"
        values = plain.with_fields({"model.rotate_values": True}, label=label)
        extended = values.with_fields(extended_fields(method), label=extended_label(method))
        found += [plain, values, extended]
    return found


def pairs(results: Results) -> list[Pair]:
    """Return the effect of each extension, then our methods with equally extended baselines."""
    same = [
        pair
        for pair in ours_vs_baselines(results)
        if num_extensions(pair.mine) == num_extensions(pair.other)
    ]
    return [*extension_pairs(results, 1), *same]


STUDY = Study(
    name="values",
    title="Rotated values and locality-biased heads",
    seeds=more_seeds,
    rows=rows,
    table=lambda results: table_of(results, pairs(results)),
    figure=lambda results: figure_of(results, pairs(results)),
)
