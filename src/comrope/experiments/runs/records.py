"""What is kept of a finished run: one record, one line of JSON."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from comrope.experiments.common.errors import UserError
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
from comrope.experiments.runs.directory import LOG, RESULT, read_result
from comrope.experiments.runs.log import read_log

__all__ = ["START", "Record", "describe", "merge", "recipe_of", "record_of"]

MOST_LOSSES = 20  # of a run
DIGITS = 4  # of a loss
START = "train.start_from"


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        id: Its identity.
        name: Its name as a folder; the identity is at the end.
        fields: The fields that decide what was learned and are not at their default. What it
            starts from is "@ID" for another run.
        runtime: The other fields that are not at their default.
        result: Its result.json.
        evaluations: Evaluations during training, as the log has them.
        measured: What studies measured of the trained model, by name.
        losses: Steps with their losses, a few.
        recipe: The family of recipes that it belongs to, and the file of a store.
        legacy: The name that its folder had in the first schema.
        schema: The schema of its fields.
        code: The version of comrope that trained it, if it is known.
        folder: The folder of the run, with its weights if they are kept; None in a store of text
            files.
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
        """Its configuration."""
        fields, _ = upgrade({**self.fields, **self.runtime}, self.schema, f"run {self.id}: ")
        return Config().with_overrides(fields)

    @property
    def parent(self) -> str | None:
        """The identity of the run that it starts from, if it starts from one."""
        start = self.fields.get(START, "")
        return start[1:] if start.startswith("@") and ":" not in start else None

    def to_json(self) -> str:
        """Return one line."""
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
    def from_json(cls, line: str) -> Record:
        """Read one line.

        Raises:
            ValueError: It is no record.
        """
        about = json.loads(line)
        try:
            return cls(
                id=about["id"],
                name=about["name"],
                fields=about["config"],
                runtime=about["runtime"],
                result=about["result"],
                evaluations=about["evaluations"],
                measured=about["measured"],
                losses=about["loss"],
                recipe=about["recipe"],
                legacy=about["legacy"],
                schema=about["schema"],
                code=about["code"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"is no run (no {error})") from None


def record_of(folder: Path, parent: str | None = None) -> Record | None:
    """Return the record of a run's folder; None if the run is not finished.

    Args:
        folder: The folder.
        parent: The identity of what the run starts from, if the folder does not have it.
    """
    if not (folder / CONFIG).is_file() or (result := read_result(folder)) is None:
        return None
    config, stored = read_config(folder)
    parent = stored or parent
    log = read_log(folder / LOG) if (folder / LOG).is_file() else []
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
    """Return the family of recipes that a configuration is closest to, of those with its data."""
    found = [
        (len(differences(config, recipe)), name)
        for name, recipe in _recipes().items()
        if recipe.data.name == config.data.name
    ]
    name = min(found, default=(0, config.data.name.replace("/", "-")))[1]
    return name.partition("_")[0]


def describe(record: Record) -> str:
    """Return a text for people: everything but the curves, in YAML."""
    about = _without(json.loads(record.to_json()), "loss", "evaluations")
    about["measured"] = [*record.measured]
    return yaml.safe_dump(about, sort_keys=False, default_flow_style=None, width=100)


def merge(known: Record, other: Record) -> Record:
    """Return what two records say of the same run: views and measurements of both.

    Raises:
        UserError: They have different results.
    """
    if _extends(other.result, known.result):
        more = other
    elif _extends(known.result, other.result):
        more = known
    else:
        wrong = [
            name
            for name, value in other.result.items()
            if not _extends(value, known.result.get(name, value))
        ]
        raise UserError(
            f"run {known.id}: expected the result that is stored, got another {', '.join(wrong)}; "
            "--replace stores the new one"
        )
    return replace(more, measured=known.measured | other.measured, legacy=known.legacy)


def _extends(more: Any, less: Any) -> bool:
    """Whether a result says what another one says, of the same views or others too."""
    if isinstance(more, dict) and isinstance(less, dict):
        return all(name in more and _extends(more[name], value) for name, value in less.items())
    return bool(more == less)


def _measured(folder: Path) -> dict[str, Any]:
    """Files beside the result, by the name of the file."""
    files = (file for file in sorted(folder.glob("*.json")) if file.name != RESULT)
    return {file.stem: json.loads(file.read_text()) for file in files}


def _losses(log: list[dict[str, Any]]) -> list[list[float]]:
    """A few points of the curve, the last one among them."""
    points = [[r["step"], float(f"{r['loss']:.{DIGITS}g}")] for r in log if r["event"] == "train"]
    every = -(-len(points) // MOST_LOSSES) or 1
    return points[::-1][::every][::-1]


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


@functools.cache
def _recipes() -> dict[str, Config]:
    return {name: load_recipe(name) for name in recipe_names()}
