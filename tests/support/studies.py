"""Results of studies without any training: finished runs in their folders, rows of results.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comrope.experiments.common.files import write_tensors
from comrope.experiments.config import Config, to_yaml
from comrope.experiments.runs.directory import CONFIG, RESULT, WEIGHTS
from comrope.experiments.studies import PRESETS, Row, find_study, run_name
from comrope.experiments.studies.plan import Plan, Request
from comrope.experiments.studies.tables import spread
from comrope.experiments.tasks import task_of

Accuracy = Callable[[Config, int], float]  # of a run, at a resolution


def row_of(top1: dict[int, dict[str, float]], method: str = "ape", **about: Any) -> dict[str, Any]:
    """A row of results.json, from accuracies by seed and view."""
    views = next(iter(top1.values()))
    return {
        "method": method,
        "label": "",
        "fields": {},
        "perturbation": 1.0,
        "perturbation_per": "sample",
        "block_size": 8,
        "finetuned": False,
        "epochs": 1.0,
        "runs": [{"seed": seed, "top1": found} for seed, found in top1.items()],
        "top1": {view: spread([found[view] for found in top1.values()]) for view in views},
        **about,
    }


def results_of(rows: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """A results.json of rows at 8 and 16 px, trained at 16."""
    return {
        "title": "A study",
        "where": "",
        "preset": "small",
        "data": "made up",
        "command": "comrope reproduce",
        "trained_at": 16,
        "resolutions": [8, 16],
        "machine": {"device": "none", "torch": "0", "date": "2026-01-01"},
        "recipe": {"data": {"holdout": 0.2}, "train": {"epochs": 20}},
        "rows": rows,
        **about,
    }


def plan_of(study: str, preset: str = "demo", runs: Path = Path("runs"), **options: Any) -> Plan:
    gather = options.pop("gather", False)
    return Request(find_study(study), PRESETS[preset], **options).plan(runs, gather=gather)


def finish_run(
    config: Config, runs: Path, top1: dict[str, float], *, weights: bool = False
) -> Path:
    """A folder as if a run was finished; with ``weights``, those before training."""
    folder = runs / run_name(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(to_yaml(config))
    date = f"2026-01-0{1 + config.train.seed}"
    machine = {"device": "GPU", "torch": "1", "date": date}
    result = {"top1": top1, "data_root": config.data.root, "machine": machine}
    (folder / RESULT).write_text(json.dumps(result))
    if weights:
        write_tensors(folder / WEIGHTS, task_of(config).build_model().state_dict())
    return folder


def finish_runs(
    out: Path,
    study: str,
    accuracy: Accuracy,
    *,
    preset: str = "small",
    seeds: int | None = 2,
    root: str | None = "there",
    **options: Any,
) -> dict[Row, list[Path]]:
    """Folders as if all runs of a study were finished, without weights."""
    plan = plan_of(study, preset, out / "runs", data=root, seeds=seeds, **options)
    return {
        row: [
            finish_run(
                config,
                out / "runs",
                {str(r): accuracy(config, r) for r in config.evaluate.resolutions},
            )
            for config in configs
        ]
        for row, configs in plan.rows.items()
    }


def table_lines(text: str) -> list[list[str]]:
    """The cells of every line of the tables in a text."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
