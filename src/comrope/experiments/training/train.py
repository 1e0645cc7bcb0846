"""Training a classifier, from one CPU to many nodes: the door to it."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from comrope.experiments.common.distributed import create_accelerator, same_for_all
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.config import Config, runtime
from comrope.experiments.data.workers import start_server
from comrope.experiments.runs.directory import LOCK, claim, read_result, write_result
from comrope.experiments.tasks.base import objective_of
from comrope.experiments.tasks.views import views_of
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.trainer import Run

__all__ = ["is_finished", "train"]


def train(config: Config, out: Path, *, progress: bool = True) -> dict[str, Any]:
    """Run a configuration in folder ``out``, from where it was left, and return its result.

    A finished run is not run again; a folder that holds another run is refused.
    """
    start_server(config.data.workers)  # before there is a GPU to this process
    accelerator = create_accelerator(config.train.device)
    claim(config, out)
    if same_for_all(accelerator, read_result(out) is not None):
        return _with_more_views(config, out, accelerator, progress)
    run = Run(config, out, accelerator, progress)
    locked = _locked(out, accelerator.is_main_process)
    with locked, _stopped_by_signals(run), contextlib.closing(run):
        run.restore()
        run.fit()
        result = run.finish()
    if run.stop is not None:  # too late for this run, but not for what would come after it
        raise Interrupted(f"{out}: finished, and stopped as asked")
    return result


def _with_more_views(
    config: Config, out: Path, accelerator: Accelerator, progress: bool
) -> dict[str, Any]:
    """The result of a finished run, in views that it had not been asked for as well."""
    result = read_result(out)
    if result is None:
        raise UserError(f"out: not every process sees {out}; it must be on storage that all share")
    known = result[config.headline]
    missing = [name for name in views_of(config) if name not in known]
    if missing:
        found = evaluate_run(out, overrides=runtime(config), only=missing, progress=progress)
        known.update({entry["view"]: entry[config.headline] for entry in found})
        if config.detects:
            figures = objective_of(config, accelerator).logged
            result["figures"].update({entry["view"]: figures(entry) for entry in found})
        if accelerator.is_main_process:
            write_result(out, result)
        accelerator.wait_for_everyone()
    return result


@contextlib.contextmanager
def _locked(out: Path, is_main: bool) -> Iterator[None]:
    """One run at a time in a folder."""
    if not is_main:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"out: another process is at work in {out}") from None
        yield


@contextlib.contextmanager
def _stopped_by_signals(run: Run) -> Iterator[None]:
    """SIGTERM and Ctrl-C let the step end, save and leave; a second Ctrl-C leaves at once."""

    def ask(number: int, _: Any) -> None:
        if run.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop = number

    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_finished(config: Config, out: Path) -> bool:
    """Whether a run has a result, in every view that is asked for."""
    result = read_result(out)
    return result is not None and set(views_of(config)) <= set(result[config.headline])
