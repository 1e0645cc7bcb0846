"""One command a table: run what is missing, gather what is there, write it down."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from comrope.experiments import checkpoint, cost, detection_study, figures, tables
from comrope.experiments.config import Config, load_recipe, to_dict
from comrope.experiments.distributed import create_accelerator
from comrope.experiments.errors import UserError
from comrope.experiments.evaluate import accuracy, build_model, load_run, validating
from comrope.experiments.folders import read_result
from comrope.experiments.inspection import angle_elements
from comrope.experiments.logs import machine, say
from comrope.experiments.plan import make_plan
from comrope.experiments.runner import Task, run_all
from comrope.experiments.sources import open_sources
from comrope.experiments.studies import LABELS, PRESETS, STUDIES, Cell, Preset, Study, run_name
from comrope.experiments.views import check_views, usual_view, views_of

__all__ = ["OFFSETS", "reproduce"]

OFFSETS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # the paper's rho, in image widths


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
    progress: bool = True,
) -> dict[str, Any]:
    """Write ``results.json``, ``table.md`` and ``figure.png`` of a study into ``out / name``.

    Runs go to ``out / "runs"`` and are shared by the studies: what is finished is not run again,
    what was interrupted goes on.
    """
    study, chosen = _lookup("name", name, STUDIES), _lookup("preset", preset, PRESETS)
    for method in methods:
        _lookup("methods", method, LABELS)
    chosen = replace(chosen, seeds=seeds or study.seeds(chosen))
    runs = out / "runs"
    base, plan = make_plan(study, chosen, runs, data=data, methods=methods, overrides=overrides)
    if name == "cost":
        results = cost.measure(base, methods=methods, progress=progress)
    else:
        _check(plan)
        tasks = [Task(config, runs / run_name(config)) for p in plan.values() for config in p]
        run_all(tasks, device=base.train.device, per_gpu=per_gpu, progress=progress)
        results = {"cells": [_gather(name, c, p, out, progress) for c, p in plan.items()]}
    if study.start in plan:
        results["pretraining"] = to_dict(plan[study.start][0])
    accelerator = create_accelerator(base.train.device)
    results = {
        "study": name,
        "title": study.title,
        "where": study.where,
        "preset": preset,
        "data": _described(base, study, chosen),
        "seeds": chosen.seeds,
        "command": shlex.join(["comrope", *sys.argv[1:]]),
        "trained_at": usual_view(base).resolution,
        "resolutions": list(base.evaluate.resolutions),
        "frames": [*base.evaluate.frames],
        "spans": [*base.evaluate.spans],
        "machine": machine(accelerator.device),
        "recipe": to_dict(base),
        **results,
        "paper": paper_figures(),
    }
    if accelerator.is_main_process:
        folder = out / _folder(name, methods, seeds, overrides)
        _write(name, results, folder)
        if name == "detection":
            _show_found(plan, runs, folder / "detections.png")
    accelerator.wait_for_everyone()
    return results


def _folder(name: str, methods: Sequence[str], seeds: int | None, overrides: Sequence[str]) -> str:
    """The study's name; with something beside it that tells apart what is not the preset's own."""
    if not (methods or seeds or overrides):
        return name
    digest = hashlib.sha256(json.dumps([seeds, sorted(overrides)]).encode()).hexdigest()[:6]
    return "-".join((name, *methods, digest))


def paper_figures() -> dict[str, Any]:
    """What the paper printed."""
    text = resources.files("comrope.experiments").joinpath("paper.yaml").read_text()
    return dict(json.loads(json.dumps(yaml.safe_load(text))))  # with keys as results.json has them


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


def _gather(
    name: str, cell: Cell, configs: list[Config], out: Path, progress: bool
) -> dict[str, Any]:
    runs = []
    for config in configs:
        folder = out / "runs" / run_name(config)
        result = read_result(folder)
        assert result is not None
        if result["data_root"] != config.data.root:
            say(f"{folder.name}: was trained on the data at {result['data_root']}")
        told = config.headline
        result[told] = {name: result[told][name] for name in views_of(config)}
        run = {"run": folder.name, "seed": config.train.seed, **result}
        if name == "offset":
            run["offset"] = _offset_curve(config, folder, progress)
        if name == "distribution":
            elements = angle_elements(load_run(folder)[1])
            run["std"] = float(elements.std())
            run["histogram"] = figures.histogram(elements)
        if config.detects:
            run["by_epoch"] = detection_study.by_epoch(folder, config, result)
        runs.append(run)
    gathered = {
        "method": cell.method,
        "perturbation": cell.perturbation,
        "perturbation_per": configs[0].train.perturbation_per,
        "block_size": cell.block_size,
        "finetuned": cell.finetuned,
        "timeless": cell.timeless,
        "runs": runs,
    }
    for key in ("top1", "AP", "offset"):
        if key in runs[0]:
            gathered[key] = {x: tables.spread([run[key][x] for run in runs]) for x in runs[0][key]}
    if "std" in runs[0]:
        gathered["std"] = tables.spread([run["std"] for run in runs])
    return gathered


def _offset_curve(config: Config, folder: Path, progress: bool) -> dict[str, float]:
    """Accuracy at the training resolution for every rho, kept beside the run."""
    file = folder / "offset.json"
    about = {"root": config.data.root, "crop_pct": config.augment.crop_pct, "rho": list(OFFSETS)}
    if file.exists() and (known := json.loads(file.read_text()))["about"] == about:
        return dict(known["top1"])
    if progress:
        say(f"moving the images: {folder.name}")
    model = load_run(folder)[1]
    accelerator = create_accelerator(config.train.device)
    if config.model.position == "liere":  # an exponential for every image, token, head and block
        smaller = max(1, config.evaluate.batch_size // 8)
        config = config.with_overrides({"evaluate.batch_size": smaller})
    model.to(accelerator.device)
    source, view = open_sources(config, train=False)[1], usual_view(config)
    with validating(config, source, accelerator) as validation:
        curve = {
            f"{rho:g}": accuracy(model, config, validation, view, accelerator, offset=rho)["top1"]
            for rho in OFFSETS
        }
    if accelerator.is_main_process:
        checkpoint.write_atomically(file, json.dumps({"about": about, "top1": curve}) + "\n")
    return curve


def _show_found(plan: dict[Cell, list[Config]], runs: Path, path: Path) -> None:
    """What one of ours finds, or whichever is there."""
    cells = [cell for cell in plan if cell.finetuned]
    chosen = next((cell for cell in cells if cell.method == "comrope-ld"), cells[-1])
    config = plan[chosen][0]
    detection_study.draw_found(load_run(runs / run_name(config))[1], config, path)
    print(f"found:   {path}")


def _write(name: str, results: dict[str, Any], folder: Path) -> None:
    checkpoint.write_atomically(folder / "results.json", json.dumps(results, indent=1) + "\n")
    text = tables.table(name, results)
    checkpoint.write_atomically(folder / "table.md", text)
    figures.draw(name, results, folder / "figure.png")
    print(text)
    print(f"results: {folder / 'results.json'}\ntable:   {folder / 'table.md'}")
    print(f"figure:  {folder / 'figure.png'}")
