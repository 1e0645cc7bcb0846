"""Results of studies, made up: finished runs in their folders, and what is written of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comrope.experiments.config import Config, to_yaml
from comrope.experiments.runs.directory import CONFIG, RESULT
from comrope.experiments.studies import PRESETS, STUDIES, Cell, run_name
from comrope.experiments.studies.markdown import spread
from comrope.experiments.studies.plan import make_plan

Accuracy = Callable[[Config, int], float]  # of a run, at a resolution


def cell_of(top1: dict[int, dict[str, float]], method: str = "ape", **about: Any) -> dict[str, Any]:
    """A cell of results.json, from accuracies by seed and view."""
    views = next(iter(top1.values()))
    return {
        "method": method,
        "name": "",
        "fields": {},
        "perturbation": 1.0,
        "perturbation_per": "sample",
        "block_size": 8,
        "finetuned": False,
        "timeless": False,
        "runs": [{"seed": seed, "top1": found} for seed, found in top1.items()],
        "top1": {view: spread([found[view] for found in top1.values()]) for view in views},
        **about,
    }


def results_of(cells: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """A results.json of cells at 8 and 16 px, trained at 16."""
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
        "cells": cells,
        **about,
    }


def finish_runs(
    out: Path, name: str, accuracy: Accuracy, *, preset: str = "small", seeds: int = 2
) -> dict[Cell, list[Path]]:
    """Folders as if all runs of a study were finished, but for their weights."""
    runs = out / "runs"
    _, plan = make_plan(STUDIES[name], PRESETS[preset], runs, data="there", seeds=seeds)
    for config in (config for configs in plan.values() for config in configs):
        folder = runs / run_name(config)
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(to_yaml(config))
        result = {
            "top1": {str(r): accuracy(config, r) for r in config.evaluate.resolutions},
            "data_root": "there",
            "machine": {"device": "GPU", "torch": "1", "date": f"2026-01-0{1 + config.train.seed}"},
        }
        (folder / RESULT).write_text(json.dumps(result))
    return {cell: [runs / run_name(config) for config in configs] for cell, configs in plan.items()}
