"""Finished runs of a study as the cells of its results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comrope.experiments import checkpoint, figures
from comrope.experiments.config import Config
from comrope.experiments.distributed import create_accelerator
from comrope.experiments.errors import UserError
from comrope.experiments.evaluate import accuracy, load_run, validating
from comrope.experiments.folders import WEIGHTS, read_result
from comrope.experiments.inspection import angle_elements
from comrope.experiments.logs import say
from comrope.experiments.sources import open_sources
from comrope.experiments.studies import detection
from comrope.experiments.studies.cells import LABELS, Cell, run_name
from comrope.experiments.studies.markdown import spread
from comrope.experiments.train import is_finished
from comrope.experiments.views import usual_view, views_of

__all__ = ["OFFSETS", "NothingThere", "gather_cell", "newest_machine", "what_is_there"]

OFFSETS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # the paper's rho, in image widths
MOVED, LEARNED = "offset.json", "angles.json"
# What a study wants of a run besides its result: one of these.
BESIDES = {"offset": (MOVED,), "distribution": (LEARNED, WEIGHTS)}


class NothingThere(UserError):
    """No run of a study is finished."""


def what_is_there(
    name: str, plan: dict[Cell, list[Config]], runs: Path
) -> tuple[dict[Cell, list[Config]], list[str]]:
    """The part of a plan that is finished; and the rows of which nothing is, by name."""

    def is_there(config: Config) -> bool:
        folder = runs / run_name(config)
        beside = BESIDES.get(name, ())
        at_hand = not beside or any((folder / file).is_file() for file in beside)
        return is_finished(config, folder) and at_hand

    there = {cell: [config for config in plan[cell] if is_there(config)] for cell in plan}
    own = [cell for cell in plan if cell.finetuned] or [*plan]  # what they start from is no result
    if not any(there[cell] for cell in own):
        raise NothingThere(
            f"out: {runs} holds no finished run of this study, expected some to gather"
        )
    missing = [_told_apart(cell, [*plan]) for cell in plan if not there[cell]]
    return {cell: configs for cell, configs in there.items() if configs}, missing


def _told_apart(cell: Cell, cells: list[Cell]) -> str:
    """The name of a row, with as much as it takes to tell it from the others."""
    row = cell.name or LABELS[cell.method]
    alike = [c for c in cells if (c.name or LABELS[c.method]) == row]
    details = []
    if len({c.perturbation for c in alike}) > 1:
        details.append(f"σ {cell.perturbation:g}")
    if len({c.block_size for c in alike}) > 1:
        details.append(f"blocks of {cell.block_size}")
    if cell.timeless:
        details.append("not told the time")
    if len({c.fields for c in alike}) > 1:
        details += (f"{key}={value}" for key, value in cell.fields)
    return f"{row} ({', '.join(details)})" if details else row


def newest_machine(cells: list[dict[str, Any]]) -> dict[str, str]:
    """Of the run that was finished last, as far as dates tell."""
    machines = [run["machine"] for cell in cells for run in cell["runs"]]
    return dict(max(machines, key=lambda machine: machine["date"]))


def gather_cell(
    name: str, cell: Cell, configs: list[Config], runs: Path, as_it_is: bool, progress: bool
) -> dict[str, Any]:
    """What was found of a row; ``as_it_is`` is without the data, so nothing more is measured."""
    found = [_run(name, config, runs / run_name(config), as_it_is, progress) for config in configs]
    gathered = {
        "method": cell.method,
        "name": cell.name,
        "fields": dict(cell.fields),
        "perturbation": cell.perturbation,
        "perturbation_per": configs[0].train.perturbation_per,
        "block_size": cell.block_size,
        "finetuned": cell.finetuned,
        "timeless": cell.timeless,
        "runs": found,
    }
    for key in ("top1", "AP", "offset"):
        if key in found[0]:
            gathered[key] = {x: spread([run[key][x] for run in found]) for x in found[0][key]}
    if "std" in found[0]:
        gathered["std"] = spread([run["std"] for run in found])
    return gathered


def _run(name: str, config: Config, folder: Path, as_it_is: bool, progress: bool) -> dict[str, Any]:
    result = read_result(folder)
    assert result is not None
    if not as_it_is and result["data_root"] != config.data.root:
        say(f"{folder.name}: was trained on the data at {result['data_root']}")
    told = config.headline
    result[told] = {view: result[told][view] for view in views_of(config)}
    run = {"run": folder.name, "seed": config.train.seed, **result}
    if name == "offset":
        known = json.loads((folder / MOVED).read_text())["top1"] if as_it_is else None
        run["offset"] = known or _offset_curve(config, folder, progress)
    if name == "distribution":
        run |= _angles(folder)
    if config.detects:
        run["by_epoch"] = detection.by_epoch(folder, config, result)
    return run


def _angles(folder: Path) -> dict[str, Any]:
    """How the elements of all angle matrices are spread, kept beside the run: its weights are not
    always."""
    if (folder / WEIGHTS).is_file():
        elements = angle_elements(load_run(folder)[1])
        found = {"std": float(elements.std()), "histogram": figures.histogram(elements)}
        checkpoint.write_atomically(folder / LEARNED, json.dumps(found) + "\n")
    return dict(json.loads((folder / LEARNED).read_text()))


def _offset_curve(config: Config, folder: Path, progress: bool) -> dict[str, float]:
    """Accuracy at the training resolution for every rho, kept beside the run."""
    file = folder / MOVED
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
