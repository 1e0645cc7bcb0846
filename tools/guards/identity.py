"""G1: identities by their first names, of kept runs, of planned runs, and of recipes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from identity_v1 import digest, run_name, to_v1

from guards.compare import differences as compare
from guards.tree import ERRORS, GOLDEN, RUN_NAME, api, root, v1_of

__all__ = ["aliases_of", "differences", "kept_configs", "observe", "reading_quickly"]

# Removed studies, whose golden entries may be missing.
REMOVED = ("ablation", "angles", "backwards", "units", "coco_mini160")
# A recipe of one method: BASE_METHOD, or BASE_METHOD_pNOISE.
OF_A_METHOD = re.compile(
    r"(?P<recipe>\w+?)_(?P<method>ape|rope|liere|[a-z]+-[a-z]+)(_p(?P<noise>\d))?"
)


def observe() -> dict[str, Any]:
    """Return digests of all configurations that have a name."""
    with reading_quickly():
        return {"kept": _kept(), "plans": _plans(), "recipes": _recipes()}


@contextlib.contextmanager
def reading_quickly() -> Iterator[None]:
    """Read YAML with the C library, and cache type annotations, within the block."""
    import typing

    import yaml

    before = yaml.SafeLoader, typing.get_type_hints
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    typing.get_type_hints = functools.cache(typing.get_type_hints)
    try:
        yield
    finally:
        yaml.SafeLoader, typing.get_type_hints = before


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return missing and different entries; new entries are no difference."""
    common = {
        part: {key: value for key, value in found[part].items() if key in golden[part]}
        for part in ("kept", "plans", "recipes")
    }
    return compare(golden, common, may_go=REMOVED)


def _kept() -> dict[str, str]:
    """Return first name -> digest of the complete configuration, for every kept run."""
    configs = kept_configs()
    aliases = aliases_of([config for _, config in configs])
    found = {}
    for name, config in configs:
        tree = v1_of(config, aliases)
        found[name] = _digest(tree, name)
    for record in _records("results/archive"):  # some have fields that were removed since
        tree: dict[str, Any] = {}
        for field, value in {**record.fields, **record.runtime}.items():
            section, _, key = field.partition(".")
            tree.setdefault(section, {})[key] = value
        found[record.legacy] = _digest(to_v1(tree), record.legacy)
    return found


def _digest(tree: dict[str, Any], name: str) -> str:
    return digest(tree) if run_name(tree) == name else f"is named {run_name(tree)}"


def kept_configs() -> list[tuple[str, Any]]:
    """Return (first name, configuration) of every kept run that is not archived."""
    from comrope.experiments.config import load_recipe

    folders = sorted((root() / "results/runs").glob("*/config.yaml"))
    if folders:  # before there were stores
        return [(file.parent.name, load_recipe(str(file))) for file in folders]
    records = _records("results")
    names = {record.id: record.name for record in records}
    found = []
    for record in records:
        config = record.config
        if record.parent:
            start = f"runs/{names[record.parent]}"
            config = config.with_overrides({"train.start_from": start})
        if record.legacy:  # runs of later versions have no first name
            found.append((record.legacy, config))
    return found


def _records(folder: str) -> list[Any]:
    """Return the runs of a store."""
    if not any((root() / folder).glob("*.jsonl")):
        return []
    store = importlib.import_module("comrope.experiments.runs.store")
    return list(store.JsonlStore(root() / folder).records())


def aliases_of(configs: list[Any]) -> dict[str, str]:
    """Return present name -> first name, for every run that others can start from."""
    present_name = api("run_name", *RUN_NAME)
    starts = [config for config in configs if not config.train.start_from]
    return {present_name(config): _name(config) for config in starts}


def _name(config: Any, aliases: dict[str, str] | None = None) -> str:
    """Return the first name of a run; the present one if it sets fields that were added since."""
    try:
        return run_name(v1_of(config, aliases))
    except ValueError:
        return str(api("run_name", *RUN_NAME)(config))


def _plans() -> dict[str, Any]:
    """Return study and preset -> rows in order, each with the last eight digits of its names."""
    from comrope.experiments.studies import PRESETS, STUDIES

    refused = api("UserError", *ERRORS)
    found: dict[str, Any] = {}
    for study in STUDIES:
        for preset in PRESETS:
            try:
                rows = _plan(study, preset)
            except refused:
                found[f"{study} {preset}"] = "refused"
                continue
            if rows:
                found[f"{study} {preset}"] = _names(rows)
    return found


def _plan(study: str, preset: str) -> dict[Any, list[Any]]:
    """Return rows with their configurations, of trees before and after ``Study`` existed."""
    from comrope.experiments import studies
    from comrope.experiments.studies import plan

    if hasattr(plan, "Request"):
        request = plan.Request(studies.STUDIES[study], studies.PRESETS[preset])
        return dict(request.plan(Path("runs"), gather=True).rows)
    asked = api("Asked", "experiments.studies.reproduce")
    return dict(asked(study, preset).plan(Path("runs"), gather=True)[1])


def _names(rows: dict[Any, list[Any]]) -> list[str]:
    aliases = aliases_of([config for configs in rows.values() for config in configs])
    found = []
    for configs in rows.values():
        names = [_name(config, aliases) for config in configs]
        (head,) = {name.rpartition("-s")[0] for name in names}
        digits = " ".join(name.rpartition("-")[2] for name in names)
        found.append(f"{head}: {digits}" + (" (start)" if _is_start(configs[0], rows) else ""))
    return found


def _is_start(config: Any, rows: dict[Any, list[Any]]) -> bool:
    """Whether other rows of the plan start from this run."""
    present_name = api("run_name", *RUN_NAME)
    starts = {Path(row.train.start_from or "").name for some in rows.values() for row in some}
    return present_name(config) in starts


def _recipes() -> dict[str, str]:
    """Return recipe -> digest of its complete configuration."""
    from comrope.experiments.config import recipe_names

    file = GOLDEN / "identity.json"
    known = json.loads(file.read_text())["recipes"] if file.is_file() else {}
    found = {}
    for name in dict.fromkeys([*known, *recipe_names()]):
        config = _recipe(name, recipe_names())
        if config is not None:
            found[name] = _recipe_digest(config)
    return found


def _recipe_digest(config: Any) -> str:
    try:
        return digest(v1_of(config))
    except ValueError:  # it sets fields that were added since
        return digest(api("non_default", "experiments.config")(config))


def _recipe(name: str, present: list[str]) -> Any:
    """Return a recipe: a file, or a file with the method that is part of the name."""
    from comrope.experiments.config import load_recipe

    if name in present:
        return load_recipe(name)
    match = OF_A_METHOD.fullmatch(name)
    if match is None or match["recipe"] not in present:
        return None
    options = {} if match["noise"] is None else {"perturbation": float(match["noise"])}
    return load_recipe(match["recipe"], method=match["method"], **options)
