"""G3: what ``comrope reproduce STUDY --preset PRESET --gather`` computes from the kept runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from identity_v1 import RENAMED_FIELDS, RENAMED_VALUES, digest, to_v1

from guards.compare import differences as compare
from guards.identity import aliases_of, kept_configs, reading_quickly
from guards.tree import ERRORS, api, root

__all__ = ["canonical_results", "differences", "observe"]

REMOVED = ("ablation", "angles", "backwards", "units")
VOLATILE = ("command",)


def observe() -> dict[str, Any]:
    """Return study and preset -> digests of its results, row by row."""
    with reading_quickly():
        return _observed()


def _observed() -> dict[str, Any]:
    from comrope.experiments.studies import PRESETS, STUDIES
    from comrope.experiments.studies.reproduce import Asked, gathered

    nothing = api("UserError", *ERRORS)
    aliases = aliases_of([config for _, config in kept_configs()])
    found: dict[str, Any] = {}
    for study in STUDIES:
        for preset in PRESETS:
            if study == "cost":
                continue
            try:
                results = gathered(Asked(study, preset), root() / "results/runs", "")
            except nothing:
                continue
            found[f"{study} {preset}"] = _digests(canonical_results(results, aliases))
    return found


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return results that differ; what is new is no difference."""
    return compare(golden, {k: v for k, v in found.items() if k in golden}, may_go=REMOVED)


def canonical_results(results: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Return results without what a command leaves there, by the first names of fields and runs."""
    found = {key: value for key, value in results.items() if key not in VOLATILE}
    for key in ("recipe", "pretraining"):
        if key in found:
            found[key] = to_v1(found[key], aliases)
    found["cells"] = [_canonical_cell(cell, aliases) for cell in found["cells"]]
    return found


def _canonical_cell(cell: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    names = {new: old for old, new in RENAMED_FIELDS.items()}
    fields = {}
    for name, value in cell["fields"].items():
        name = names.get(name, name)
        values = {new: old for old, new in RENAMED_VALUES.get(name, {}).items()}
        fields[name] = values.get(value, value) if isinstance(value, str) else value
    runs = [{**run, "run": _first_name(run["run"], aliases)} for run in cell["runs"]]
    return {**cell, "fields": fields, "runs": runs}


def _first_name(run: str, aliases: dict[str, str]) -> str:
    return aliases.get(Path(run).name, Path(run).name)


def _digests(results: dict[str, Any]) -> dict[str, Any]:
    cells = []
    for cell in results["cells"]:
        row = {key: value for key, value in cell.items() if not isinstance(value, (dict, list))}
        parts = {key: value for key, value in cell.items() if key not in row}
        name = f"{cell['method']} {cell['name']} b{cell['block_size']} p{cell['perturbation']:g}"
        cells.append({"row": name, **{key: digest(value)[:8] for key, value in parts.items()}})
    rest = {key: digest(value)[:8] for key, value in results.items() if key != "cells"}
    return {"cells": cells, **rest}
