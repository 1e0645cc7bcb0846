"""A study at a preset, as a command requests it: the configuration of every run."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import RUNTIME, Config, load_recipe
from comrope.experiments.config.build import suggest
from comrope.experiments.runs.store import FolderStore
from comrope.experiments.studies.study import (
    METHODS,
    OF_ROWS,
    PRESETS,
    Preset,
    Row,
    Start,
    Study,
)
from comrope.experiments.tasks import task_of

__all__ = ["Plan", "Request", "find_preset"]

PRETRAIN = "pretrain."  # in front of a field for the runs that others start from


class Plan(NamedTuple):
    """What the rows have in common, and the configurations of each row, one a seed."""

    base: Config
    rows: dict[Row, list[Config]]


@dataclass(frozen=True)
class Request:
    """A study at a preset, with what a command changes.

    Args:
        study: the study.
        preset: the scale.
        data: folder of the data, instead of the recipe's.
        seeds: runs a row, instead of the study's.
        methods: only rows of these methods.
        overrides: "field=value" for all rows; with "pretrain." in front, for the runs that they
            start from.
    """

    study: Study
    preset: Preset
    data: str | None = None
    seeds: int | None = None
    methods: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def num_seeds(self) -> int:
        """Runs a row, if the row sets no maximum."""
        return self.seeds or self.study.seeds(self.preset)

    @property
    def folder(self) -> str:
        """The name of the folder of results: the study's, and a digest of what was changed."""
        if not (self.methods or self.seeds or self.overrides):
            return self.study.name
        changed = json.dumps([self.seeds, sorted(self.overrides)])
        digest = hashlib.sha256(changed.encode()).hexdigest()[:6]
        return "-".join((self.study.name, *self.methods, digest))

    def plan(self, runs: Path, *, gather: bool = False) -> Plan:
        """Return every run, those that others start from first.

        Args:
            runs: the folder of the folders of runs.
            gather: nothing will be trained, so data may be missing.
        """
        study, preset = self.study, self.preset
        first = [text for text in self.overrides if study.start and text.startswith(PRETRAIN)]
        own = [text for text in self.overrides if text not in first]
        first = [text.removeprefix(PRETRAIN) for text in first]
        every = study.rows(preset)
        _check_overrides(study, every, (*own, *first))
        self._check_methods(every)
        place = {} if self.data is None else {"data.root": self.data}
        recipe = load_recipe(study.scale(preset).recipe)
        base = recipe.with_overrides(study.settings(recipe))
        base = base.with_overrides(own).with_overrides(place)
        _check_task(study, base)
        rows = {
            row: [row.config(base, seed) for seed in range(self._seeds_of(row))]
            for row in every
            if not self.methods or row.method in self.methods
        }
        if study.start is None or base.train.start_from:
            return Plan(base, rows)
        count = 1 if study.start.shared else max(map(len, rows.values()))
        starts = _starts(study.start, preset, count, own, first, place)
        if not gather:
            _check_start(study.start, starts[0])
        folders = [str(FolderStore(runs).folder(start)) for start in starts]
        for row, configs in rows.items():
            rows[row] = [
                config.with_overrides({"train.start_from": folder})
                for config, folder in zip(configs, itertools.cycle(folders), strict=False)
            ]
        return Plan(base, {study.start.row: starts, **rows})

    def _seeds_of(self, row: Row) -> int:
        if self.seeds or row.max_seeds is None:
            return self.num_seeds
        return min(row.max_seeds, self.num_seeds)

    def _check_methods(self, rows: list[Row]) -> None:
        known = [*dict.fromkeys(row.method for row in rows)] or METHODS
        for method in self.methods:
            if method not in known:
                raise UserError(
                    f"methods: expected some of {', '.join(known)}; got {method!r}"
                    f"{suggest(method, known)}"
                )


def find_preset(name: str) -> Preset:
    """Return the preset of a name, or raise."""
    if name not in PRESETS:
        raise UserError(
            f"preset: expected one of {', '.join(PRESETS)}; got {name!r}{suggest(name, PRESETS)}"
        )
    return PRESETS[name]


def _check_overrides(study: Study, rows: Iterable[Row], overrides: Sequence[str]) -> None:
    """Raise if a command sets what the rows differ in."""
    of_rows = {name for row in rows for name, _ in row.fields}
    of_start = () if study.start is None else study.start.decides
    for text in overrides:
        name = text.partition("=")[0]
        if name in (*OF_ROWS, *of_start, *of_rows):
            raise UserError(
                f"{name}: the rows of the study {study.name} set it; choose rows with --methods "
                "and --seeds"
            )


def _check_task(study: Study, base: Config) -> None:
    found = task_of(base).name
    if study.task and study.task != found:
        raise UserError(
            f"data.name: the study {study.name} is for {study.task}; got {base.data.name!r}, which "
            f"is of {found}"
        )


def _starts(
    start: Start,
    preset: Preset,
    seeds: int,
    own: Sequence[str],
    first: Sequence[str],
    place: dict[str, str],
) -> list[Config]:
    """Return the runs that the others start from, one a seed."""
    common = [text for text in own if _is_common(text.partition("=")[0], start)]
    before = load_recipe(start.recipe(preset)).with_overrides(common)
    before = before.with_overrides({} if start.other_data else place).with_overrides(first)
    return [start.row.config(before, seed) for seed in range(seeds)]


def _check_start(start: Start, config: Config) -> None:
    embedded = config.data.name in task_of(config).embedded
    if start.other_data and config.data.root is None and not embedded:
        raise UserError(
            f"{PRETRAIN}data.root: not given; expected the folder of the data for pre-training the "
            "backbone, or a trained one in train.start_from"
        )


def _is_common(name: str, start: Start) -> bool:
    """Whether a field holds for a run and for the run that it starts from."""
    section = name.partition(".")[0]
    if start.other_data:
        return section == "model" or (section == "train" and name in RUNTIME)
    return section in ("model", "data") or name in RUNTIME
