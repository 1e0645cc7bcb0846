"""Pairs of rows in the study of languages, and their differences, for its table and figure."""

from __future__ import annotations

from typing import NamedTuple

from comrope.experiments.studies.stats import Difference, compare, holm
from comrope.experiments.studies.study import Results
from comrope.experiments.studies.tables import row_name

__all__ = [
    "BASE",
    "LONGER",
    "METRIC",
    "SUFFIX",
    "VALUES",
    "Pair",
    "compared_views",
    "lengths_of",
    "pairs_of",
    "rotates_values",
]

BASE = 10000.0  # the usual one
VALUES, SUFFIX = "model.rotate_values", ", rotated values"
METRIC = "bits_per_byte"
LONGER = 4  # times the context of training, for scalings at evaluation and for differences


class Pair(NamedTuple):
    """A row, the row that it is compared with, and the differences in the compared views."""

    mine: Results
    other: Results
    differences: list[Difference | None]
    significant: list[bool]  # after Holm correction over all differences of all pairs

    @property
    def same_kind(self) -> bool:
        """Whether both rows rotate values, or none."""
        return rotates_values(self.mine) == rotates_values(self.other)


def lengths_of(results: Results) -> list[str]:
    """Return the context lengths of the evaluation."""
    return [*results["rows"][0][METRIC]]


def compared_views(results: Results) -> tuple[str, str]:
    """Return the views of the differences: the context of training, and ``LONGER`` of it."""
    context = results["recipe"]["language"]["context"]
    return str(context), str(LONGER * context)


def rotates_values(row: Results) -> bool:
    return bool(row["fields"].get(VALUES))


def pairs_of(results: Results) -> list[Pair]:
    """Return every row with the reference, then rows with rotated values with those without.

    The reference is vanilla RoPE with the searched base, with rotated values if the row has them.
    """
    views = compared_views(results)
    pairs = _pairs(results)
    found = [
        [compare(mine, other, [view], METRIC, lower_is_better=True) for view in views]
        for mine, other in pairs
    ]
    significant = iter(holm([each for both in found for each in both]))
    return [
        Pair(mine, other, both, [next(significant) for _ in both])
        for (mine, other), both in zip(pairs, found, strict=True)
    ]


def _pairs(results: Results) -> list[tuple[Results, Results]]:
    rows = [row for row in results["rows"] if row["method"] != "none"]
    by_name = {row_name(row): row for row in rows}
    reference = {}
    for row in rows:  # the last base is the one that was searched
        if row["method"] == "rope" and "model.rotated_share" not in row["fields"]:
            reference[rotates_values(row)] = row
    found = [
        (row, reference[rotates_values(row)])
        for row in rows
        if reference.get(rotates_values(row), row) is not row
    ]
    plain = [(row, by_name.get(row_name(row).removesuffix(SUFFIX))) for row in rows]
    return found + [(row, other) for row, other in plain if other is not None and other is not row]
