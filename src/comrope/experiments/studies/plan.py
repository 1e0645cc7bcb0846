"""The plan of a study at a preset: the configuration of every run."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import comrope
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import shown
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

PRETRAIN = "pretrain."  # prefix of fields for the runs that others start from


class Plan(NamedTuple):
    """The common configuration, and the configurations of each row, one per seed."""

    base: Config
    rows: dict[Row, list[Config]]


@dataclass(frozen=True)
class Request:
    """A study at a preset, with the options of a command.

    Args:
        study: The study.
        preset: The scale.
        data: Folder of the data, instead of the recipe's.
        seeds: Runs per row, instead of the study's number.
        methods: Only rows of these methods. Studies with a row per method have one for any method,
            also if it is not in the preset.
        overrides: "field=value" for all rows; with the prefix "pretrain." for the runs that they
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
        """Runs per row, if the row sets no maximum."""
        return self.seeds or self.study.seeds(self.preset)

    @property
    def folder(self) -> str:
        """The name of the results folder: the study's, with a digest of the options."""
        if not (self.methods or self.seeds or self.overrides):
            return self.study.name
        changed = json.dumps([self.seeds, sorted(self.overrides)])
        digest = hashlib.sha256(changed.encode()).hexdigest()[:6]
        return "-".join((self.study.name, *self.methods, digest))

    def plan(self, runs: Path, *, gather: bool = False) -> Plan:
        """Return every run; runs that others start from come first.

        Args:
            runs: The folder that contains the folders of runs.
            gather: Whether nothing is trained, so that data may be missing.
        """
        study, preset = self.study, self.preset
        first = [text for text in self.overrides if study.start and text.startswith(PRETRAIN)]
        own = [text for text in self.overrides if text not in first]
        first = [text.removeprefix(PRETRAIN) for text in first]
        every = study.rows(self._preset_of_rows())
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

    def _preset_of_rows(self) -> Preset:
        """Return the preset; with all methods if the command names some."""
        if not self.methods:
            return self.preset
        every = dict.fromkeys((*self.preset.methods, *comrope.METHODS))
        return replace(self.preset, methods=tuple(every))

    def _seeds_of(self, row: Row) -> int:
        if self.seeds or row.max_seeds is None:
            return self.num_seeds
        return min(row.max_seeds, self.num_seeds)

    def _check_methods(self, rows: list[Row]) -> None:
        methods = [*dict.fromkeys(row.method for row in rows)] or METHODS
        for method in self.methods:
            if method not in methods:
                hint = "" if method in METHODS else suggest(method, methods)
                raise UserError(
                    f"methods: expected some of {', '.join(methods)}; got {shown(method)}{hint}"
                )


def find_preset(name: str) -> Preset:
    """Return a preset by name."""
    if name not in PRESETS:
        raise UserError(
            f"preset: expected one of {', '.join(PRESETS)}; got {shown(name)}"
            f"{suggest(name, PRESETS)}"
        )
    return PRESETS[name]


def _check_overrides(study: Study, rows: Iterable[Row], overrides: Sequence[str]) -> None:
    """Raise if an override sets a field that the rows set."""
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
            f"data.name: expected data of {study.task} for the study {study.name}, got "
            f"{base.data.name!r} of {found}"
        )


def _starts(
    start: Start,
    preset: Preset,
    seeds: int,
    own: Sequence[str],
    first: Sequence[str],
    place: dict[str, str],
) -> list[Config]:
    """Return the runs that the others start from, one per seed."""
    common = [text for text in own if _is_common(text.partition("=")[0], start)]
    before = load_recipe(start.recipe(preset)).with_overrides(common)
    before = before.with_overrides({} if start.other_data else place).with_overrides(first)
    return [start.row.config(before, seed) for seed in range(seeds)]


def _check_start(start: Start, config: Config) -> None:
    embedded = config.data.name in task_of(config).embedded
    if start.other_data and config.data.root is None and not embedded:
        raise UserError(
            f"{PRETRAIN}data.root: not given; expected the folder of the pre-training data, or a "
            "trained run in train.start_from"
        )


def _is_common(name: str, start: Start) -> bool:
    """Return whether an override is for a run and also for the run that it starts from."""
    section = name.partition(".")[0]
    if start.other_data:
        return section == "model" or (section == "train" and name in RUNTIME)
    return section in ("model", "data") or name in RUNTIME
