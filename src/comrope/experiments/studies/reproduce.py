"""One command a table: run what is missing, gather what is there, write it down."""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comrope.experiments.common.console import machine, say
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_text
from comrope.experiments.config import Config, load_recipe, to_dict
from comrope.experiments.launch import Task, run_all
from comrope.experiments.studies import (
    LABELS,
    PRESETS,
    STUDIES,
    Cell,
    Preset,
    Study,
    plots,
    run_name,
    tables,
)
from comrope.experiments.studies.gathering import gather_cell, newest_machine, what_is_there
from comrope.experiments.studies.markdown import counts_of_seeds
from comrope.experiments.studies.paper import cost, detection
from comrope.experiments.studies.plan import Plan, make_plan
from comrope.experiments.studies.study import packaged
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.views import usual_view
from comrope.experiments.training.evaluate import load_run

__all__ = ["Asked", "gathered", "reproduce"]


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
    asked = Asked(name, preset, data, seeds, tuple(methods), tuple(overrides))
    runs = out / "runs"
    base, plan = asked.plan(runs, gather=gather)
    if name == "cost":
        if gather:
            raise UserError("gather: the study cost has no runs, expected one that trains")
        found = cost.measure(base, methods=methods, progress=progress)
    elif gather:
        found = _gathered(name, plan, runs, True, progress)
        for row in found["missing"]:
            say(f"left out, no run is finished: {row}")
    else:
        _check(plan)
        # Seed by seed: what is stopped half-way has all its rows, of fewer seeds.
        by_seed = itertools.chain.from_iterable(itertools.zip_longest(*plan.values()))
        tasks = [Task(config, runs / run_name(config)) for config in by_seed if config]
        run_all(tasks, device=base.train.device, per_gpu=per_gpu, progress=progress)
        rows = plan.items()
        found = {"cells": [gather_cell(name, *row, runs, False, progress) for row in rows]}
    accelerator = create_accelerator(base.train.device)
    found = {"machine": machine(accelerator.device)} | found
    command = shlex.join(["comrope", *sys.argv[1:]])
    results = _told(asked, base, plan, found, command)
    if accelerator.is_main_process:
        folder = out / asked.folder
        _write(name, results, folder)
        if name == "detection" and not gather:
            _show_found(plan, runs, folder / "detections.png")
    accelerator.wait_for_everyone()
    return results


def gathered(asked: Asked, runs: Path, command: str) -> dict[str, Any]:
    """The results of the runs that are there, on which nothing else depends."""
    base, plan = asked.plan(runs, gather=True)
    return _told(asked, base, plan, _gathered(asked.name, plan, runs, False, False), command)


@dataclass(frozen=True)
class Asked:
    """A study, at a scale, with what a command changes of it."""

    name: str
    preset: str = "demo"
    data: str | None = None
    seeds: int | None = None
    methods: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _lookup("name", self.name, STUDIES), _lookup("preset", self.preset, PRESETS)
        for method in self.methods:
            _lookup("methods", method, LABELS)

    @property
    def study(self) -> Study:
        return STUDIES[self.name]

    @property
    def scale(self) -> Preset:
        chosen = PRESETS[self.preset]
        return replace(chosen, seeds=self.seeds or self.study.seeds(chosen))

    @property
    def folder(self) -> str:
        """The study's name; with something beside it that tells apart what is not the preset's
        own."""
        if not (self.methods or self.seeds or self.overrides):
            return self.name
        changed = json.dumps([self.seeds, sorted(self.overrides)])
        digest = hashlib.sha256(changed.encode()).hexdigest()[:6]
        return "-".join((self.name, *self.methods, digest))

    def plan(self, runs: Path, *, gather: bool) -> Plan:
        return make_plan(
            self.study,
            self.scale,
            runs,
            data=self.data,
            seeds=self.seeds,
            methods=self.methods,
            overrides=self.overrides,
            gather=gather,
        )


def _gathered(
    name: str, plan: dict[Cell, list[Config]], runs: Path, measure: bool, progress: bool
) -> dict[str, Any]:
    there, missing = what_is_there(name, plan, runs, measure)
    cells = [gather_cell(name, *row, runs, True, progress) for row in there.items()]
    return {"cells": cells, "missing": missing, "machine": newest_machine(cells)}


def _told(
    asked: Asked,
    base: Config,
    plan: dict[Cell, list[Config]],
    found: dict[str, Any],
    command: str,
) -> dict[str, Any]:
    """All of results.json."""
    study, scale = asked.study, asked.scale
    if study.start in plan:
        found["pretraining"] = to_dict(plan[study.start][0])
    return {
        "study": asked.name,
        "title": study.title,
        "where": study.where,
        "preset": asked.preset,
        "data": _described(base, study, scale, found),
        "seeds": max(counts_of_seeds(found), default=scale.seeds),
        "command": command,
        **_evaluated(base),
        "recipe": to_dict(base),
        **found,
        "paper": paper_figures(),
    }


def _evaluated(base: Config) -> dict[str, Any]:
    return {
        "trained_at": usual_view(base).resolution,
        "resolutions": list(base.evaluate.resolutions),
        "frames": [*base.evaluate.frames],
        "spans": [*base.evaluate.spans],
    }


def paper_figures() -> dict[str, Any]:
    """What the paper printed."""
    # With keys as results.json has them.
    return dict(json.loads(json.dumps(packaged("paper/paper.yaml"))))


def _described(base: Config, study: Study, preset: Preset, found: dict[str, Any]) -> str:
    """What was trained on what: the preset's words, or those of the command that changed it and of
    the runs."""
    usual = load_recipe(study.recipe(preset))
    if (base.model.name, base.data.name) == (usual.model.name, usual.data.name):
        return study.described(preset)
    runs = [run for cell in found.get("cells", ()) for run in cell["runs"]]
    roots = {Path(run["data_root"]).name for run in runs if run.get("data_root")}
    return f"{', '.join(sorted(roots)) or base.data.name}, {base.model.name}"


def _lookup(label: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UserError(f"{label}: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def _check(plan: dict[Cell, list[Config]]) -> None:
    """Everything that can be wrong, before the first run rather than at the tenth."""
    firsts = [configs[0] for configs in plan.values()]
    for data, config in {replace(each.data, cache=False): each for each in firsts}.items():
        task_of(replace(config, data=data)).open()
    for configs in plan.values():
        task = task_of(configs[0])
        model = task.build_model()
        for view in task.views().values():
            task.check_view(model, view)


def _show_found(plan: dict[Cell, list[Config]], runs: Path, path: Path) -> None:
    """What one of ours finds, or whichever is there."""
    cells = [cell for cell in plan if cell.finetuned]
    chosen = next((cell for cell in cells if cell.method == "comrope-ld"), cells[-1])
    config = plan[chosen][0]
    detection.draw_found(load_run(runs / run_name(config))[1], config, path)
    print(f"found:   {path}")


def _write(name: str, results: dict[str, Any], folder: Path) -> None:
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    text = tables.table(name, results)
    write_text(folder / "table.md", text)
    plots.draw(name, results, folder / "figure.png")
    print(text)
    print(f"results: {folder / 'results.json'}\ntable:   {folder / 'table.md'}")
    print(f"figure:  {folder / 'figure.png'}")
