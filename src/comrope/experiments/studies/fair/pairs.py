"""The pairs of rows that the fair comparison compares."""

from __future__ import annotations

from typing import NamedTuple

from comrope.experiments.studies.fair.rows import EXTENSIONS, OURS
from comrope.experiments.studies.stats import Difference, compare
from comrope.experiments.studies.study import Results
from comrope.experiments.studies.tables import row_name, training_size

__all__ = ["Pair", "all_pairs", "extension_pairs", "num_extensions", "ours_vs_baselines"]


class Pair(NamedTuple):
    """Two rows and their differences."""

    mine: Results
    other: Results
    trained: Difference | None  # at the training resolution
    mean: Difference | None  # of the mean over resolutions

    @property
    def is_perturbation_effect(self) -> bool:
        """Whether the rows differ only in perturbation."""
        return bool(self.mine["perturbation"]) and row_name(self.mine) == row_name(self.other)

    @property
    def family(self) -> str:
        """The family of differences that are corrected together."""
        if self.is_perturbation_effect:
            return "between perturbation and none"
        return f"with σ = {self.mine['perturbation']:g}"


def _pair(results: Results, mine: Results, other: Results) -> Pair:
    every, size = [str(r) for r in results["resolutions"]], training_size(results)
    return Pair(mine, other, compare(mine, other, [size]), compare(mine, other, every))


def all_pairs(results: Results) -> list[Pair]:
    """Return our methods with baselines, then the effects of extensions and of perturbation."""
    extended = extension_pairs(results, len(EXTENSIONS))
    return [*ours_vs_baselines(results), *extended, *_perturbation_pairs(results)]


def extension_pairs(results: Results, count: int) -> list[Pair]:
    """Return pairs of one method and perturbation, where one row has ``count`` more extensions.

    If a method has several rows with fewer extensions, like vanilla RoPE, the last is used.
    """
    found = []
    for mine in results["rows"]:
        fewer = [
            other
            for other in results["rows"]
            if mine["method"] == other["method"] and mine["perturbation"] == other["perturbation"]
            if num_extensions(mine) == num_extensions(other) + count
            if mine["epochs"] == other["epochs"]
        ]
        found += [_pair(results, mine, other) for other in fewer[-1:]]
    return found


def ours_vs_baselines(results: Results) -> list[Pair]:
    """Return our methods with baselines that have at most as many extensions."""
    return [
        _pair(results, mine, other)
        for mine in results["rows"]
        for other in results["rows"]
        if mine["method"] in OURS and other["method"] not in OURS
        # A model without positions has no perturbation.
        if other["method"] == "none" or other["perturbation"] == mine["perturbation"]
        if num_extensions(other) <= num_extensions(mine)
        if num_extensions(mine) or other["epochs"] == 1  # more epochs are for extended rows
    ]


def _perturbation_pairs(results: Results) -> list[Pair]:
    none = {row_name(row): row for row in results["rows"] if not row["perturbation"]}
    some = [row for row in results["rows"] if row["perturbation"] and row_name(row) in none]
    return [_pair(results, row, none[row_name(row)]) for row in some]


def num_extensions(row: Results) -> int:
    return sum(name in row["fields"] for name in EXTENSIONS)
