"""The folder of a run: its configuration, result and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_text
from comrope.experiments.config import (
    CONFIG,
    Config,
    differences,
    load_recipe,
    read_config,
    start_id,
    to_yaml,
)

__all__ = [
    "CONFIG",
    "LOCK",
    "LOG",
    "RESULT",
    "WEIGHTS",
    "check_run_dir",
    "read_result",
    "read_weights",
    "upgrade_result",
    "write_config",
    "write_result",
]

LOG, RESULT, WEIGHTS = "log.jsonl", "result.json", "model.safetensors"
LOCK = ".lock"
RENAMED = {"taken_for": "confusion"}  # entries of results that earlier versions wrote


def check_run_dir(config: Config, out: Path) -> None:
    """Raise unless ``out`` is new, empty, or contains a run of the same configuration."""
    if out.exists() and not out.is_dir():
        raise UserError(f"out: {out} is a file, expected a folder")
    if not out.exists() or all(path.name.startswith(".") for path in out.iterdir()):
        return  # an interrupted first write leaves a hidden file
    if not (out / CONFIG).is_file():
        raise UserError(f"out: {out} holds something else than a run; nothing was changed")
    if not (out / RESULT).exists() and not any((out / "checkpoints").glob("step-*")):
        return  # it stopped before its first checkpoint
    if different := differences(config, *read_config(out)):
        raise UserError(
            f"out: {out} holds another run ({'; '.join(different[:5])}); nothing was changed. "
            "Choose another folder"
        )


def write_config(out: Path, config: Config) -> None:
    """Write the configuration of a run, with the identity of its initial weights.

    If these weights no longer exist when a run is resumed, the stored identity is kept.
    """
    start, stored = config.train.start_from, None
    if (out / CONFIG).is_file():
        before, parent = read_config(out)
        stored = parent if before.train.start_from == start else None
    write_text(out / CONFIG, to_yaml(config, start_id(start, stored)))


def read_result(out: Path) -> dict[str, Any] | None:
    """Return the result of a finished run; None for other folders."""
    try:
        return upgrade_result(json.loads((out / RESULT).read_text()))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(
            f"{out / RESULT}: expected JSON; remove the file to evaluate the run again"
        ) from None


def upgrade_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the present names of its entries."""
    return {RENAMED.get(name, name): value for name, value in dict(result).items()}


def read_weights(out: Path, label: str = "run") -> tuple[Config, dict[str, Tensor]]:
    """Return the configuration and the evaluated weights of a finished run."""
    weights = out / WEIGHTS
    if str(out).startswith("@"):
        raise UserError(
            f"{label}: {out} is a stored run without weights; train it with `comrope train {out} "
            "--out FOLDER`, and pass that folder"
        )
    if not (out / CONFIG).is_file():
        raise UserError(f"{label}: {out} holds no run (no {CONFIG})")
    if not weights.is_file():
        raise UserError(f"{label}: {out} is not finished (no {WEIGHTS}); train it first")
    try:
        return load_recipe(str(out / CONFIG)), load_file(weights)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{label}: {weights} cannot be read ({error})") from None


def write_result(out: Path, result: dict[str, Any]) -> None:
    write_text(out / RESULT, json.dumps(result, indent=1) + "\n")
