"""One command a table: run what is missing, gather what is there, write it down."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comrope.experiments import checkpoint, figures
from comrope.experiments.config import Config, load_recipe, to_dict
from comrope.experiments.distributed import create_accelerator
from comrope.experiments.errors import UserError
from comrope.experiments.evaluate import build_model, load_run
from comrope.experiments.logs import machine
from comrope.experiments.runner import Task, run_all
from comrope.experiments.sources import open_sources
from comrope.experiments.studies import (
    LABELS,
    PRESETS,
    STUDIES,
    Cell,
    Preset,
    Study,
    cost,
    detection,
    run_name,
    tables,
)
from comrope.experiments.studies.cells import packaged
from comrope.experiments.studies.gathering import gather_cell, newest_machine, what_is_there
from comrope.experiments.studies.markdown import counts_of_seeds
from comrope.experiments.studies.plan import make_plan
from comrope.experiments.views import check_views, usual_view, views_of

__all__ = ["reproduce"]


def reproduce(
    name: str,
    *,
    preset: str = "demo",
    out: Path,
    data: str | None = None,
    seeds: int | None = None,
    methods: Sequence[str] = (),
    overrides: Sequence[str] = (),
    per_gpu: int = 1,
    gather: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Write ``results.json``, ``table.md`` and ``figure.png`` of a study into ``out / name``.

    Runs go to ``out / "runs"`` and are shared by the studies: what is finished is not run again,
    what was interrupted goes on. To ``gather`` is to train nothing, and to write down what there is
    of the runs, whose data need not be here.
    """
    study, chosen = _lookup("name", name, STUDIES), _lookup("preset", preset, PRESETS)
    for method in methods:
        _lookup("methods", method, LABELS)
    if gather and name == "cost":
        raise UserError("gather: the study cost has no runs, expected one that trains")
    chosen = replace(chosen, seeds=seeds or study.seeds(chosen))
    runs = out / "runs"
    base, plan = make_plan(
        study, chosen, runs, data=data, methods=methods, overrides=overrides, gather=gather
    )
    if name == "cost":
        results = cost.measure(base, methods=methods, progress=progress)
    else:
        if not gather:
            _check(plan)
            tasks = [Task(config, runs / run_name(config)) for p in plan.values() for config in p]
            run_all(tasks, device=base.train.device, per_gpu=per_gpu, progress=progress)
        rows = (what_is_there(name, plan, runs) if gather else plan).items()
        results = {"cells": [gather_cell(name, *row, runs, gather, progress) for row in rows]}
    if study.start in plan:
        results["pretraining"] = to_dict(plan[study.start][0])
    accelerator = create_accelerator(base.train.device)
    results = {
        "study": name,
        "title": study.title,
        "where": study.where,
        "preset": preset,
        "data": _described(base, study, chosen),
        "seeds": max(counts_of_seeds(results), default=chosen.seeds),
        "command": shlex.join(["comrope", *sys.argv[1:]]),
        **_evaluated(base),
        "machine": newest_machine(results["cells"]) if gather else machine(accelerator.device),
        "recipe": to_dict(base),
        **results,
        "paper": paper_figures(),
    }
    if accelerator.is_main_process:
        folder = out / _folder(name, methods, seeds, overrides)
        _write(name, results, folder)
        if name == "detection" and not gather:
            _show_found(plan, runs, folder / "detections.png")
    accelerator.wait_for_everyone()
    return results


def _evaluated(base: Config) -> dict[str, Any]:
    return {
        "trained_at": usual_view(base).resolution,
        "resolutions": list(base.evaluate.resolutions),
        "frames": [*base.evaluate.frames],
        "spans": [*base.evaluate.spans],
    }


def _folder(name: str, methods: Sequence[str], seeds: int | None, overrides: Sequence[str]) -> str:
    """The study's name; with something beside it that tells apart what is not the preset's own."""
    if not (methods or seeds or overrides):
        return name
    digest = hashlib.sha256(json.dumps([seeds, sorted(overrides)]).encode()).hexdigest()[:6]
    return "-".join((name, *methods, digest))


def paper_figures() -> dict[str, Any]:
    """What the paper printed."""
    # With keys as results.json has them.
    return dict(json.loads(json.dumps(packaged("paper.yaml"))))


def _described(base: Config, study: Study, preset: Preset) -> str:
    """What was trained on what: the preset's words, or those of the command that changed it."""
    usual = load_recipe(study.recipe(preset))
    if (base.model.name, base.data.name) == (usual.model.name, usual.data.name):
        return study.described(preset)
    return f"{base.data.name} {base.data.root or ''}, {base.model.name}"


def _lookup(label: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UserError(f"{label}: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def _check(plan: dict[Cell, list[Config]]) -> None:
    """Everything that can be wrong, before the first run rather than at the tenth."""
    firsts = [configs[0] for configs in plan.values()]
    for data, config in {replace(each.data, cache=False): each for each in firsts}.items():
        open_sources(replace(config, data=data))
    for configs in plan.values():
        check_views(build_model(configs[0]), views_of(configs[0]).values())


def _show_found(plan: dict[Cell, list[Config]], runs: Path, path: Path) -> None:
    """What one of ours finds, or whichever is there."""
    cells = [cell for cell in plan if cell.finetuned]
    chosen = next((cell for cell in cells if cell.method == "comrope-ld"), cells[-1])
    config = plan[chosen][0]
    detection.draw_found(load_run(runs / run_name(config))[1], config, path)
    print(f"found:   {path}")


def _write(name: str, results: dict[str, Any], folder: Path) -> None:
    checkpoint.write_atomically(folder / "results.json", json.dumps(results, indent=1) + "\n")
    text = tables.table(name, results)
    checkpoint.write_atomically(folder / "table.md", text)
    figures.draw(name, results, folder / "figure.png")
    print(text)
    print(f"results: {folder / 'results.json'}\ntable:   {folder / 'table.md'}")
    print(f"figure:  {folder / 'figure.png'}")
