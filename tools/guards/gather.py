"""G3: what ``comrope reproduce STUDY --preset PRESET --gather`` computes from the kept runs."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from identity_v1 import RENAMED_FIELDS, RENAMED_VALUES, digest, to_v1

from guards.compare import differences as compare
from guards.identity import aliases_of, kept_configs, reading_quickly
from guards.tree import ERRORS, api, root, without_later_fields

__all__ = ["canonical_results", "differences", "observe"]

REMOVED = ("ablation", "angles", "backwards", "units")
VOLATILE = ("command",)
TIME_AXIS = "model.axis_scale"  # no committed study has another use of it
ENTRIES = {"confusion": "taken_for"}  # of results: present -> first
# Words of rows and titles: present -> first.
WORDS = {
    ", extended": ", values and near",
    ", rotated values": ", values too",
    "1.25× epochs": "a quarter longer",
    "Rotated values and locality-biased heads": "Values that are rotated besides queries and keys",
}


def observe() -> dict[str, Any]:
    """Return study and preset -> digests of its results, row by row."""
    with reading_quickly():
        return _observed()


LATER = ("language", "language-search")  # studies that the first form of results cannot describe


def _observed() -> dict[str, Any]:
    from comrope.experiments.studies import PRESETS, STUDIES

    nothing = api("UserError", *ERRORS)
    aliases = aliases_of([config for _, config in kept_configs()]) | _names_of_records()
    found: dict[str, Any] = {}
    for study in STUDIES:
        for preset in PRESETS:
            if study == "cost" or study in LATER:
                continue
            try:
                results = _gathered(study, preset)
            except nothing:
                continue
            found[f"{study} {preset}"] = _digests(canonical_results(results, aliases))
    return found


def _gathered(study: str, preset: str) -> dict[str, Any]:
    """Return the results of a study, before and after studies became objects."""
    from comrope.experiments import studies
    from comrope.experiments.studies import plan, reproduce

    if not hasattr(plan, "Request"):
        asked, runs = reproduce.Asked(study, preset), root() / "results/runs"
        return dict(reproduce.gathered(asked, runs, ""))
    report = importlib.import_module("comrope.experiments.studies.report")
    request = plan.Request(studies.STUDIES[study], studies.PRESETS[preset])
    runs = report.kept_runs(root() / "results")
    return _first_form(reproduce.existing_results(request, runs, ""))


@functools.cache
def _names_of_records() -> dict[str, str]:
    """Return the name of every kept run -> its first name."""
    try:
        report = importlib.import_module("comrope.experiments.studies.report")
        runs = report.kept_runs(root() / "results")
    except AttributeError:  # before there were stores
        return {}
    records = (runs.known or runs.trained).records()
    return {record.name: record.legacy or record.name for record in records}


def _first_form(results: dict[str, Any]) -> dict[str, Any]:
    """Return results with their first keys and words."""
    found = {key: value for key, value in results.items() if key != "rows"}
    for key in ("title", "missing"):
        if key in found:
            text = found[key]
            found[key] = [*map(_first_words, text)] if key == "missing" else _first_words(text)
    found["cells"] = [_first_cell(row) for row in results["rows"]]
    return found


def _first_cell(row: dict[str, Any]) -> dict[str, Any]:
    """Return the first form of a row; the control of clips had a flag instead of a field."""
    control = TIME_AXIS in row["fields"]
    names = {"label": "name", "epochs": "longer"}
    return {
        **{names.get(key, key): value for key, value in row.items()},
        "name": "" if control else _first_words(row["label"]),
        "fields": {key: value for key, value in row["fields"].items() if key != TIME_AXIS},
        "timeless": control,
    }


def _first_words(text: str) -> str:
    for new, old in WORDS.items():
        text = text.replace(new, old)
    return text


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return results that differ; new results are no difference."""
    return compare(golden, {k: v for k, v in found.items() if k in golden}, may_go=REMOVED)


def canonical_results(results: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Return results without the command, with the first names of fields and runs."""
    found = {key: value for key, value in results.items() if key not in VOLATILE}
    for key in ("recipe", "pretraining"):
        if key in found:
            found[key] = to_v1(without_later_fields(found[key]), aliases)
    found["cells"] = [_canonical_cell(cell, aliases) for cell in found["cells"]]
    return found


def _canonical_cell(cell: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    names = {new: old for old, new in RENAMED_FIELDS.items()}
    fields = {}
    for name, value in cell["fields"].items():
        name = names.get(name, name)
        values = {new: old for old, new in RENAMED_VALUES.get(name, {}).items()}
        fields[name] = values.get(value, value) if isinstance(value, str) else value
    runs = [_canonical_run(run, aliases) for run in cell["runs"]]
    return {**cell, "fields": fields, "runs": runs}


def _canonical_run(run: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    entries = {ENTRIES.get(name, name): value for name, value in run.items()}
    return {**entries, "run": _first_name(run["run"], aliases)}


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
