"""One command for a study: train the missing runs, gather all of them, write table and figure."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comrope.experiments.cluster import Cluster, run_on_cluster
from comrope.experiments.common.console import machine, say
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.figures import save
from comrope.experiments.common.files import write_text
from comrope.experiments.config import Config, load_recipe, to_dict
from comrope.experiments.launch import Run, run_all
from comrope.experiments.runs.store import open_store
from comrope.experiments.studies import find_study
from comrope.experiments.studies.measure import (
    Finished,
    NoRuns,
    Runs,
    gather_row,
    gather_study,
    newest_machine,
    usable,
)
from comrope.experiments.studies.plan import Plan, Request, find_preset
from comrope.experiments.studies.study import Results, Row, Study, packaged
from comrope.experiments.studies.tables import seed_counts, study_table
from comrope.experiments.tasks import task_of

__all__ = ["existing_results", "paper_figures", "reproduce"]


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
    known: Path | None = None,
    cluster: Cluster | None = None,
    progress: bool = True,
) -> Results:
    """Write results.json, table.md and figure.png of a study into ``out / name``.

    Runs go to ``out / "runs"`` and are shared by studies. Finished runs are not trained again, and
    interrupted ones continue.

    Args:
        name: a study of this package, or "package.module:STUDY".
        preset: the scale.
        out: the folder for runs and results.
        data: folder of the data, instead of the recipe's.
        seeds: runs a row, instead of the study's.
        methods: only rows of these methods, which need not be in the preset.
        overrides: "field=value" for all rows.
        per_gpu: runs at a time on each GPU.
        gather: train nothing, and use the runs that are finished. Their data may be missing.
        known: a folder with finished runs, which are not trained again.
        cluster: where runs are trained, each in a job of its own; by default on this machine.
        progress: print progress.

    Returns:
        The content of results.json.
    """
    study = find_study(name)
    request = Request(study, find_preset(preset), data, seeds, tuple(methods), tuple(overrides))
    runs = Runs(out / "runs", None if known is None else open_store(known))
    plan = request.plan(runs.folder, gather=gather)
    if gather and not study.trains:
        raise UserError(f"gather: the study {study.name} trains no runs; leave it out")
    if cluster is not None and (gather or not study.trains or per_gpu > 1):
        raise UserError(
            "cluster: every run is trained in a job of its own; expected a study that trains runs, "
            "without --gather and --per-gpu"
        )
    if study.run is not None:
        found = study.run(plan.base, methods=methods, progress=progress)
    elif gather:
        found = _gather(study, plan, runs, progress)
    else:
        _check(plan.rows)
        missing = _missing(study, plan, runs)
        if cluster is None:
            run_all(missing, device=plan.base.train.device, per_gpu=per_gpu, progress=progress)
        else:
            run_on_cluster(missing, cluster, progress=progress)
        rows = [
            gather_row(study, row, [_finished(c, runs) for c in configs], progress=progress)
            for row, configs in plan.rows.items()
        ]
        found = {"rows": rows}
        if cluster is not None:  # this machine has trained nothing
            found["machine"] = newest_machine(rows)
    accelerator = create_accelerator(plan.base.train.device)
    found = {"machine": machine(accelerator.device), **found}
    results = _results(request, plan, found, shlex.join(["comrope", *sys.argv[1:]]))
    if accelerator.is_main_process:
        _write(study, results, out / request.folder)
        if not gather:
            _write_artifacts(study, plan, runs, out / request.folder)
    accelerator.wait_for_everyone()
    return results


def existing_results(request: Request, runs: Runs, command: str) -> Results:
    """Return the results that kept runs give: nothing is trained or measured."""
    plan = request.plan(runs.folder, gather=True)
    return _results(request, plan, gather_study(request.study, plan.rows, runs), command)


def _gather(study: Study, plan: Plan, runs: Runs, progress: bool) -> Results:
    found = gather_study(study, plan.rows, runs, measure=True, progress=progress)
    for row in found["missing"]:
        say(f"left out, no run is finished: {row}")
    return found


def _missing(study: Study, plan: Plan, runs: Runs) -> list[Run]:
    """Return the runs of a plan that must be trained, seed by seed.

    So a study that is stopped has all its rows, with fewer seeds.
    """
    by_seed = itertools.chain.from_iterable(itertools.zip_longest(*plan.rows.values()))
    every = [config for config in by_seed if config]
    missing = [c for c in every if not usable(study, c, runs, measure=True)]
    starts = {config.train.start_from for config in missing}  # their weights are needed
    wanted = [c for c in every if c in missing or str(runs.path(c)) in starts]
    return [Run(config, runs.path(config)) for config in wanted]


def _finished(config: Config, runs: Runs) -> Finished:
    record = runs.find(config)
    if record is None:
        raise NoRuns(f"{runs.path(config)}: expected a finished run")
    return Finished(config, record)


def _check(rows: dict[Row, list[Config]]) -> None:
    """Raise before the first run for anything that is wrong with one of them."""
    firsts = [configs[0] for configs in rows.values()]
    for data, config in {replace(each.data, cache=False): each for each in firsts}.items():
        task_of(replace(config, data=data)).open()
    for config in firsts:
        task = task_of(config)
        model = task.build_model()
        for view in task.views().values():
            task.check_view(model, view)


def _results(request: Request, plan: Plan, found: Results, command: str) -> Results:
    """Return all of results.json."""
    study, base = request.study, plan.base
    if study.start is not None and study.start.row in plan.rows:
        found["pretraining"] = to_dict(plan.rows[study.start.row][0])
    return {
        "study": study.name,
        "title": study.title,
        "where": study.where,
        "preset": request.preset.name,
        "data": _describe_data(request, base, found),
        "seeds": max(seed_counts(found), default=request.num_seeds),
        "command": command,
        "trained_at": getattr(task_of(base).training_view, "resolution", None),
        "resolutions": [*base.evaluate.resolutions],
        "frames": [*base.evaluate.frames],
        "spans": [*base.evaluate.spans],
        "recipe": to_dict(base),
        **found,
        "paper": paper_figures(),
    }


def paper_figures() -> dict[str, Any]:
    """Return the numbers that the paper printed, with keys as in results.json."""
    return dict(json.loads(json.dumps(packaged("paper/paper.yaml"))))


def _describe_data(request: Request, base: Config, found: Results) -> str:
    """Return data and model in words: the preset's, unless the command changed them."""
    scale = request.study.scale(request.preset)
    usual = load_recipe(scale.recipe)
    if (base.model.name, base.data.name) == (usual.model.name, usual.data.name):
        return scale.data
    runs = [run for row in found.get("rows", ()) for run in row["runs"]]
    roots = {Path(run["data_root"]).name for run in runs if run.get("data_root")}
    return f"{', '.join(sorted(roots)) or base.data.name}, {base.model.name}"


def _write(study: Study, results: Results, folder: Path) -> None:
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    text = study_table(study, results)
    write_text(folder / "table.md", text)
    save(study.figure(results), folder / "figure.png")
    print(text)
    print(f"results: {folder / 'results.json'}\ntable:   {folder / 'table.md'}")
    print(f"figure:  {folder / 'figure.png'}")


def _write_artifacts(study: Study, plan: Plan, runs: Runs, folder: Path) -> None:
    for name, draw in study.artifacts.items():
        save(draw(plan, runs), folder / name)
        print(f"more:    {folder / name}")
