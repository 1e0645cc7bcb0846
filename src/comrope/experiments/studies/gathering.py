"""Finished runs of a study as the cells of its results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comrope.experiments.common.console import say
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config
from comrope.experiments.runs.directory import read_result
from comrope.experiments.studies.markdown import spread
from comrope.experiments.studies.measure import is_at_hand, look_beside
from comrope.experiments.studies.paper import detection
from comrope.experiments.studies.study import LABELS, Cell, run_name
from comrope.experiments.tasks.views import views_of
from comrope.experiments.training.train import is_finished

__all__ = ["NothingThere", "gather_cell", "newest_machine", "what_is_there"]

FEW = 2  # rows of one name that are told one by one


class NothingThere(UserError):
    """No run of a study is finished."""


def what_is_there(
    name: str, plan: dict[Cell, list[Config]], runs: Path, measure: bool
) -> tuple[dict[Cell, list[Config]], list[str]]:
    """The part of a plan that is finished, and of which what else the study wants is known, or may
    be ``measure``d; and the rows of which nothing is, by name."""

    def is_there(config: Config) -> bool:
        folder = runs / run_name(config)
        return is_finished(config, folder) and is_at_hand(name, config, folder, measure)

    there = {cell: [config for config in plan[cell] if is_there(config)] for cell in plan}
    own = [cell for cell in plan if cell.finetuned] or [*plan]  # what they start from is no result
    if not any(there[cell] for cell in own):
        raise NothingThere(
            f"out: {runs} holds no finished run of this study, or nothing of what it wants of them "
            "besides; expected some to gather"
        )
    missing = [cell for cell in plan if not there[cell]]
    return {cell: configs for cell, configs in there.items() if configs}, _named(missing, [*plan])


def _named(missing: list[Cell], cells: list[Cell]) -> list[str]:
    """One by one; where many are of one name, how many."""
    found: dict[str, None] = {}
    for cell in missing:
        alike = [c for c in missing if _row(c) == _row(cell)]
        many = f"{_row(cell)} ({len(alike)} rows)"
        found[_told_apart(cell, cells) if len(alike) <= FEW else many] = None
    return [*found]


def _row(cell: Cell) -> str:
    return cell.name or LABELS[cell.method]


def _told_apart(cell: Cell, cells: list[Cell]) -> str:
    """The name of a row, with as much as it takes to tell it from the others."""
    row = _row(cell)
    alike = [c for c in cells if _row(c) == row]
    details = []
    if len({c.perturbation for c in alike}) > 1:
        details.append(f"σ {cell.perturbation:g}")
    if len({c.block_size for c in alike}) > 1:
        details.append(f"blocks of {cell.block_size}")
    if cell.timeless:
        details.append("not told the time")
    details += (
        f"{key}={value}" for key, value in cell.fields if (key, value) not in _common(alike)
    )
    return f"{row} ({', '.join(details)})" if details else row


def _common(cells: list[Cell]) -> set[tuple[str, Any]]:
    """The fields that all of them have."""
    return set.intersection(*(set(cell.fields) for cell in cells))


def newest_machine(cells: list[dict[str, Any]]) -> dict[str, str]:
    """Of the run that was finished last, as far as dates tell."""
    machines = [run["machine"] for cell in cells for run in cell["runs"]]
    return dict(max(machines, key=lambda machine: machine["date"]))


def gather_cell(
    name: str, cell: Cell, configs: list[Config], runs: Path, as_it_is: bool, progress: bool
) -> dict[str, Any]:
    """What was found of a row; ``as_it_is`` may be without its data, to measure more."""
    found = [_run(name, config, runs / run_name(config), as_it_is, progress) for config in configs]
    gathered = {
        "method": cell.method,
        "name": cell.name,
        "fields": dict(cell.fields),
        "perturbation": cell.perturbation,
        "perturbation_per": configs[0].train.perturbation_per,
        "block_size": cell.block_size,
        "finetuned": cell.finetuned,
        "longer": cell.longer,
        "timeless": cell.timeless,
        "runs": found,
    }
    for key in ("top1", "AP", "offset"):
        if key in found[0]:
            gathered[key] = {x: spread([run[key][x] for run in found]) for x in found[0][key]}
    if "units" in found[0]:
        gathered["units"] = {
            share: {x: spread([run["units"][share][x] for run in found]) for x in by_size}
            for share, by_size in found[0]["units"].items()
        }
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
    run |= look_beside(name, config, folder, as_it_is, progress)
    if config.detects:
        run["by_epoch"] = detection.by_epoch(folder, config, result)
    return run
