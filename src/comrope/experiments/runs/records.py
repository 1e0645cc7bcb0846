"""Records of finished runs: one run, one line of JSON."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from comrope import _json
from comrope._checks import one_line
from comrope._json import NUMBER, TEXT, Entries, Items, Kind, Nullable
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.json_files import read_json
from comrope.experiments.config import (
    CONFIG,
    SCHEMA,
    TIMM,
    Config,
    differences,
    load_recipe,
    non_default,
    read_config,
    recipe_names,
    run_id,
    run_name,
    runtime,
    upgrade,
)
from comrope.experiments.runs.directory import (
    LOG,
    RESULT,
    RESULT_SCHEMA,
    check_config,
    read_result,
    upgrade_result,
)
from comrope.experiments.runs.log import read_log

__all__ = ["START", "Record", "describe", "merge", "recipe_of", "record_of"]

MOST_LOSSES = 20  # per run
DIGITS = 4  # per loss
LONGEST_NAME = 60  # characters of a file's name
START = "train.start_from"
TO_MEASURE = "remove the file to measure the run again, or move it if it is no measurement"
MEASURED = Entries(optional={"about": Entries(), "found": Entries()})


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{12}", value) is not None


def _is_file_name(value: Any) -> bool:
    plain = isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME
    return plain and not re.search(r"^\.|/", value)


RECORD = Entries(
    {
        "schema": Kind(
            f"an integer from 1 to {SCHEMA}", lambda v: type(v) is int and 1 <= v <= SCHEMA
        ),
        "id": Kind("12 hexadecimal digits", _is_id),
        "name": TEXT,
        "legacy": Nullable(TEXT),
        "recipe": Kind("the name of a file", _is_file_name),  # in a store
        "config": Entries(optional={START: TEXT}),
        "runtime": Entries(),
        "result": RESULT_SCHEMA,
        "evaluations": Items(Entries()),
        "measured": Entries(others=MEASURED),
        "loss": Items(Items(NUMBER)),
        "code": Nullable(TEXT),
    }
)


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        id: Its identity.
        name: The name of its folder, which ends with the identity.
        fields: The fields that decide what was learned and differ from their defaults.
            "train.start_from" is "@ID" for another run.
        runtime: The other fields that differ from their defaults.
        result: Its result.json.
        evaluations: Evaluations during training, from its log.
        measured: Results of studies that measured the trained model, by name.
        losses: At most ``MOST_LOSSES`` pairs of step and loss.
        recipe: Its family of recipes, which names its file in a store.
        legacy: The name of its folder in the first schema.
        schema: The schema of its fields.
        code: The version of comrope that trained it, if known.
        folder: The folder of the run, which may have its weights; None in a store of text files.
    """

    id: str
    name: str
    fields: dict[str, Any]
    runtime: dict[str, Any]
    result: dict[str, Any]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)
    recipe: str = ""
    legacy: str | None = None
    schema: int = SCHEMA
    code: str | None = None
    folder: Path | None = field(default=None, compare=False)

    @property
    def config(self) -> Config:
        """The configuration of the run; ``UserError`` if this version does not accept it."""
        try:
            fields, _ = upgrade({**self.fields, **self.runtime}, self.schema)
            return Config().with_overrides(fields)
        except UserError as error:
            raise UserError(f"run {self.id}: {one_line(error)}") from None

    @property
    def parent(self) -> str | None:
        """The identity of the run whose weights it starts from; None without one."""
        start = self.fields.get(START, "")
        return start[1:] if start.startswith("@") and ":" not in start else None

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        about = {
            "schema": self.schema,
            "id": self.id,
            "name": self.name,
            "legacy": self.legacy,
            "recipe": self.recipe,
            "config": self.fields,
            "runtime": self.runtime,
            "parent": self.parent,
            "result": self.result,
            "evaluations": self.evaluations,
            "measured": self.measured,
            "loss": self.losses,
            "code": self.code,
        }
        return json.dumps(about, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Read a record from one line of JSON.

        Raises:
            ValueError: The line is not a record.
        """
        about = _json.parse(line, RECORD)
        record = cls(
            id=about["id"],
            name=about["name"],
            fields=about["config"],
            runtime=about["runtime"],
            result=upgrade_result(about["result"]),
            evaluations=about["evaluations"],
            measured=about["measured"],
            losses=about["loss"],
            recipe=about["recipe"],
            legacy=about["legacy"],
            schema=about["schema"],
            code=about["code"],
        )
        if about.get("parent", record.parent) != record.parent:
            raise ValueError(f"parent: expected {record.parent!r} as in {START}, got another")
        return record


def record_of(folder: Path, parent: str | None = None) -> Record | None:
    """Return the record of a run's folder; None if the run is not finished.

    Args:
        folder: The folder.
        parent: The identity of the initial weights, if the folder does not contain it.
    """
    if not (folder / CONFIG).is_file() or (result := read_result(folder)) is None:
        return None
    check_config(folder)
    config, stored = read_config(folder)
    parent = stored or parent
    log = read_log(folder / LOG)
    fields = non_default(config, parent)
    start = fields.get(START)
    if start is not None and not start.startswith(TIMM):
        fields[START] = f"@{start}"
    usual = runtime(Config())
    return Record(
        id=run_id(config, parent),
        name=run_name(config, parent),
        fields=fields,
        runtime={name: v for name, v in runtime(config).items() if v != usual[name]},
        result=result,
        evaluations=[_without(r, "event", "time") for r in log if r["event"] == "evaluation"],
        measured=_measured(folder),
        losses=_losses(log),
        recipe=recipe_of(config),
        code=result.get("machine", {}).get("comrope"),
        folder=folder,
    )


def recipe_of(config: Config) -> str:
    """Return the family of the most similar recipe, among those with the same data."""
    found = [
        (len(differences(config, recipe)), name)
        for name, recipe in _recipes().items()
        if recipe.data.name == config.data.name
    ]
    name = min(found, default=(0, config.data.name.replace("/", "-")))[1]
    return name.partition("_")[0]


def describe(record: Record) -> str:
    """Return a record as YAML, without losses and evaluations."""
    about = _without(json.loads(record.to_json()), "loss", "evaluations")
    about["measured"] = [*record.measured]
    return yaml.safe_dump(about, sort_keys=False, default_flow_style=None, width=100)


def merge(stored: Record, other: Record) -> Record:
    """Merge two records of the same run: the views and measurements of both.

    Raises:
        UserError: They have different results.
    """
    if _extends(other.result, stored.result):
        more = other
    elif _extends(stored.result, other.result):
        more = stored
    else:
        wrong = [
            name
            for name, value in other.result.items()
            if not _extends(value, stored.result.get(name, value))
        ]
        raise UserError(
            f"run {stored.id}: expected the stored result, got another {', '.join(wrong)}; "
            "--replace stores the new one"
        )
    return replace(more, measured=stored.measured | other.measured, legacy=stored.legacy)


def _extends(more: Any, less: Any) -> bool:
    """Return whether a result contains all values of another one."""
    if isinstance(more, dict) and isinstance(less, dict):
        return all(name in more and _extends(more[name], value) for name, value in less.items())
    return bool(more == less)


def _measured(folder: Path) -> dict[str, Any]:
    """Return the content of the JSON files other than the result, by name."""
    files = (file for file in sorted(folder.glob("*.json")) if file.name != RESULT)
    try:
        return {file.stem: read_json(file, MEASURED, TO_MEASURE) for file in files}
    except FileNotFoundError as error:  # a link to a file that does not exist
        raise UserError(f"{error.filename}: cannot be read; {TO_MEASURE}") from None


def _losses(log: list[dict[str, Any]]) -> list[list[float]]:
    """Return a few points of the loss curve, including the last one."""
    points = [[r["step"], float(f"{r['loss']:.{DIGITS}g}")] for r in log if r["event"] == "train"]
    every = -(-len(points) // MOST_LOSSES) or 1
    return points[::-1][::every][::-1]


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


@functools.cache
def _recipes() -> dict[str, Config]:
    return {name: load_recipe(name) for name in recipe_names()}
