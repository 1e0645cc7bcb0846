"""Check the files of finished runs, and seal them again after a deliberate change."""

from __future__ import annotations

from pathlib import Path

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.runs.directory import (
    CONFIG,
    RESULT,
    WEIGHTS,
    check_config,
    headline_of,
    read_result,
    reseal,
)
from comrope.experiments.tasks import task_of
from comrope.experiments.training.evaluate import in_file, load_run

__all__ = ["reseal_run", "verify_run"]


def verify_run(folder: Path) -> None:
    """Raise unless the files of a finished run belong together.

    The weights may be missing, because results can be used without them.

    Raises:
        UserError: A file has changed since the run was finished, the result does not have the form
            of its task, or the weights do not fit the model or are not finite.
    """
    check_config(folder)
    _check_result(folder, sealed=True)
    if (folder / WEIGHTS).is_file():
        load_run(folder)


def reseal_run(folder: Path) -> None:
    """Seal a finished run with its present files, after every other check of ``verify_run``."""
    load_run(folder, sealed=False)
    _check_result(folder, sealed=False)
    reseal(folder)


def _check_result(folder: Path, *, sealed: bool) -> None:
    config, result = load_recipe(folder / CONFIG), read_result(folder, sealed=sealed)
    if result is None:
        raise UserError(f"run: {folder} is not finished (no {RESULT}); train it first")
    with in_file(folder / CONFIG):
        headline = task_of(config).headline
    headline_of(result, headline, folder / RESULT)
