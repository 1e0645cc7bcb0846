"""A study at a scale, as a command asks for it: the configuration of every run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import RUNTIME, Config, load_recipe
from comrope.experiments.studies import OF_ROWS, Cell, Preset, Study, run_name

__all__ = ["Plan", "make_plan"]

PRETRAIN = "pretrain."  # in front of a field that is meant for the runs that others start from


class Plan(NamedTuple):
    base: Config  # what the rows have in common
    rows: dict[Cell, list[Config]]  # a configuration a seed


def make_plan(
    study: Study,
    preset: Preset,
    runs: Path,
    *,
    data: str | None = None,
    seeds: int | None = None,
    methods: Sequence[str] = (),
    overrides: Sequence[str] = (),
    gather: bool = False,
) -> Plan:
    """Every run of a study, those that others start from first; ``runs`` is where they will be, or
    to ``gather`` them where they are, of data that need not be there."""
    first = [text for text in overrides if study.start and text.startswith(PRETRAIN)]
    own = [text for text in overrides if text not in first]
    first = [text.removeprefix(PRETRAIN) for text in first]
    every = study.cells(preset)
    of_cells = {name for cell in every for name, _ in cell.fields}
    for text in (*own, *first):
        if (field := text.partition("=")[0]) in (*OF_ROWS, *study.decides, *of_cells):
            raise UserError(
                f"{field}: is what the rows of this study differ in (--methods, --seeds)"
            )
    place = {} if data is None else {"data.root": data}
    recipe = load_recipe(study.recipe(preset))
    base = recipe.with_overrides(study.settings(recipe)).with_overrides(own).with_overrides(place)
    known = [cell.method for cell in every]
    if wrong := [method for method in methods if known and method not in known]:
        wanted = ", ".join(dict.fromkeys(known))
        raise UserError(f"methods: expected some of this study's, {wanted}; got {wrong[0]!r}")
    cells = [cell for cell in every if not methods or cell.method in methods]
    rows = {
        cell: [cell.config(base, seed) for seed in range(seeds or study.seeds_of(cell, preset))]
        for cell in cells
    }
    if study.start is None or base.train.start_from:
        return Plan(base, rows)
    before = 1 if study.one_start else max(map(len, rows.values()))
    starts = _starts(study, preset, before, own, first, place)
    if not gather:
        _check_start(study, starts[0])
    for cell, configs in rows.items():
        rows[cell] = [
            config.with_overrides({"train.start_from": str(runs / run_name(start))})
            for config, start in zip(configs, itertools.cycle(starts), strict=False)
        ]
    return Plan(base, {study.start: starts, **rows})


def _starts(
    study: Study,
    preset: Preset,
    seeds: int,
    own: Sequence[str],
    first: Sequence[str],
    place: dict[str, str],
) -> list[Config]:
    """What the others start from, a configuration a seed."""
    assert study.start is not None
    common = [text for text in own if _holds_for_both(text.partition("=")[0], study)]
    before = load_recipe(study.recipe_of_start(preset)).with_overrides(common)
    before = before.with_overrides({} if study.starts_elsewhere else place).with_overrides(first)
    return [study.start.config(before, seed) for seed in range(seeds)]


def _check_start(study: Study, start: Config) -> None:
    if study.starts_elsewhere and start.data.root is None and start.data.name != "digits":
        raise UserError(
            f"{PRETRAIN}data.root: not given; say where the data is that the backbone is trained "
            "on, or what it starts from, train.start_from"
        )


def _holds_for_both(field: str, study: Study) -> bool:
    """Whether a field is no matter of one training alone: the model, the data, what decides
    nothing."""
    section = field.partition(".")[0]
    if study.starts_elsewhere:
        return section == "model" or (section == "train" and field in RUNTIME)
    return section in ("model", "data") or field in RUNTIME
