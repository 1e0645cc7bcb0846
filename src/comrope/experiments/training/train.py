"""Train a configuration in a folder, with a lock, signals, checkpoints, log and result."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import Accelerator

from comrope.experiments.common import interrupts
from comrope.experiments.common.console import machine, peak_memory, say
from comrope.experiments.common.distributed import broadcast, create_accelerator
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.common.files import write_text
from comrope.experiments.common.memory import shortage_reported
from comrope.experiments.config import CONFIG, Config, runtime
from comrope.experiments.data.workers import start_server
from comrope.experiments.runs.directory import (
    LOCK,
    LOG,
    RESULT,
    check_run_dir,
    headline_of,
    read_result,
    write_config,
    write_finished,
    write_result,
)
from comrope.experiments.runs.log import Log, read_log
from comrope.experiments.tasks import Task, task_of
from comrope.experiments.training import checkpoint
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.metrics import summarize_evaluations, summarize_speed
from comrope.experiments.training.state import Snapshot
from comrope.experiments.training.trainer import Outcome, Trainer

__all__ = ["RunFolder", "is_finished", "train"]

MOST_NAMED = 1000  # in the log, of what training leaves out for one reason
TO_NEED_LESS = (
    "a larger train.accumulate, a smaller evaluate.batch_size or fewer evaluate.resolutions need "
    "less; the same command with these continues"
)


def train(config: Config, out: Path, *, progress: bool = True) -> dict[str, Any]:
    """Train a configuration in a folder, or resume it, and return its result.

    A finished run is not repeated. A folder with another run is refused.

    Args:
        config: The configuration.
        out: The folder of the run.
        progress: Show progress bars.

    Returns:
        The result, as in ``result.json``; empty in all processes except the main one.
    """
    task = task_of(config)
    start_server(config.data.workers)  # before this process uses a GPU
    accelerator = create_accelerator(config.train.device)
    check_run_dir(config, out)
    if broadcast(accelerator, read_result(out) is not None):
        return _add_views(task, out, accelerator, progress)
    folder = RunFolder(out, keep=config.train.keep, is_main=accelerator.is_main_process)
    with shortage_reported(TO_NEED_LESS):
        trainer = Trainer(task, accelerator, folder, label=out.name, progress=progress)
    with (
        folder.locked(),
        folder.stopped_by_signals(),
        contextlib.closing(trainer),
        shortage_reported(TO_NEED_LESS),
    ):
        try:
            _begin(trainer, folder)
            trainer.fit()
            outcome = trainer.finish()
        except Interrupted as stopped:
            raise Interrupted(f"{out}: {stopped}", folder.stop or signal.SIGTERM) from None
        result = _write(trainer, folder, outcome)
    if folder.stop is not None:  # too late for this run, but it stops later runs
        raise Interrupted(f"{out}: finished, then stopped by a signal", folder.stop)
    return result


def is_finished(config: Config, out: Path) -> bool:
    """Return whether a run has a result, in every view of its configuration."""
    result = read_result(out)
    task = task_of(config)
    if result is None:
        return False
    return set(task.views()) <= set(headline_of(result, task.headline, out / RESULT))


class RunFolder:
    """A sink of a trainer that writes to a folder, and stops the trainer on signals.

    Args:
        out: The folder.
        keep: Number of checkpoints that remain.
        is_main: Whether this is the main process, which alone writes.
    """

    def __init__(self, out: Path, *, keep: int = 2, is_main: bool = True) -> None:
        self.out, self.keep, self.is_main = out, keep, is_main
        self.stop: int | None = None  # the received signal
        self.records: Log | None = None
        self.config = ""  # the text of its file
        self.owner = secrets.token_hex(8)  # the content of our lock

    def should_stop(self, step: int) -> bool:
        """Return whether this process received a signal to stop."""
        return self.stop is not None

    def checkpoint(self, state: Snapshot) -> None:
        """Write a checkpoint."""
        if self.is_main:
            self.check_folder()
            folder = self.out / "checkpoints"
            checkpoint.save(folder, state.step, state.parts, state.values, keep=self.keep)

    def log(self, event: str, **values: Any) -> None:
        """Write a record to the log."""
        assert self.records is not None
        self.check_folder()
        self.records.write(event, **values)

    def open(self, config: Config, *, step: int) -> None:
        """Write the configuration, and open the log to continue after a step."""
        if self.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
            self.config = write_config(self.out, config)
            self.records = Log(self.out, resume_from=step)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder within the block; raise if another process has locked it."""
        if not self.is_main:
            yield
            return
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / LOCK).open("a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"out: another process is training in {self.out}") from None
            file.truncate(0)
            file.write(self.owner)
            file.flush()
            yield

    def check_folder(self) -> None:
        """Raise if the folder was removed, or another process trains in a new one of its name."""
        if not self.out.is_dir():
            raise UserError(
                f"out: {self.out} was removed during training, with its checkpoints; the same "
                "command trains from the beginning"
            )
        with contextlib.suppress(FileNotFoundError):
            owner = (self.out / LOCK).read_text(encoding="utf-8", errors="replace")
            if owner not in ("", self.owner):
                raise UserError(
                    f"out: {self.out} was removed during training, and another process trains in "
                    "a new folder of this name; nothing was changed. Choose another folder"
                )
        if self.config and not (self.out / CONFIG).exists():
            write_text(self.out / CONFIG, self.config)

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Stop after the current step on SIGTERM or Ctrl-C; immediately on a second Ctrl-C."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop is not None and number == signal.SIGINT:
                interrupts.interrupt(number, frame)
            self.stop = number

        if threading.current_thread() is not threading.main_thread():
            yield  # the main thread handles signals
            return
        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _begin(trainer: Trainer, folder: RunFolder) -> None:
    """Restore the newest complete checkpoint, or begin at step 0; open the folder."""
    accelerator, out = trainer.accelerator, folder.out
    found = checkpoint.latest(out / "checkpoints")
    step = 0 if found is None else found.step
    if step != broadcast(accelerator, step):
        raise UserError(
            f"out: not every process can read the checkpoints in {out}; expected shared storage"
        )
    report = None
    if found is None:
        report = trainer.initialize()
    else:
        trainer.restore(found)
    accelerator.wait_for_everyone()
    if trainer.is_main and found is not None:
        say(f"{out}: resumed at step {step}")
    if trainer.is_main and report is not None and (note := report.note()):
        say(f"{out}: {note}")
    if trainer.progress:
        precision = trainer.config.train.precision
        say(
            f"{accelerator.num_processes} process(es), {accelerator.device}, precision {precision};"
            f" {trainer.task.describe_data(trainer.source)}"
        )
    left_out = trainer.task.left_out(trainer.source)
    if trainer.is_main and left_out:
        reasons = ", ".join(f"{reason}: {len(names)}" for reason, names in left_out.items())
        say(f"{out}: training leaves out {reasons}")
    folder.open(trainer.config, step=step)
    if trainer.is_main and report is not None:
        folder.log("started", step=0, **report._asdict())
    if trainer.is_main and found is None:
        for reason, names in left_out.items():
            first = names[:MOST_NAMED]
            folder.log("left_out", step=0, reason=reason, count=len(names), first=first)


def _write(trainer: Trainer, folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Write weights and result; return the result, empty except in the main process."""
    result: dict[str, Any] = {}
    if trainer.is_main:
        assert folder.records is not None
        result = _summary(trainer, folder, outcome)
        folder.log("result", step=trainer.step, **result)
        write_finished(folder.out, folder.config, outcome.weights, result)
    trainer.accelerator.wait_for_everyone()
    return result


def _summary(trainer: Trainer, folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Return the content of ``result.json``."""
    task, device, by_view = trainer.task, trainer.accelerator.device, outcome.by_view
    records = [r for r in read_log(folder.out / LOG) if r["event"] == "train"]
    unreadable = max(found["unreadable"] for found in by_view.values())
    return {
        **task.summarize(trainer.validation_source, by_view),
        **summarize_evaluations(by_view, task.samples),
        "position_parameters": task.position_parameters(trainer.bare),
        "parameters": sum(p.numel() for p in trainer.bare.parameters()),
        "steps": trainer.step,
        "processes": trainer.accelerator.num_processes,
        **summarize_speed(records, f"{task.samples}_per_second"),
        "peak_memory_gib": peak_memory(device),
        "data_root": trainer.config.data.root,
        "unreadable": {"training": outcome.unreadable, "validation": unreadable},
        "left_out": {r: len(names) for r, names in task.left_out(trainer.source).items()},
        "machine": machine(device),
    }


def _add_views(task: Task, out: Path, accelerator: Accelerator, progress: bool) -> dict[str, Any]:
    """Evaluate a finished run in the missing views of its configuration; return its result."""
    result = read_result(out)
    if result is None:
        raise UserError(f"out: not every process can read {out}; expected shared storage")
    found = headline_of(result, task.headline, out / RESULT)
    missing = [name for name in task.views() if name not in found]
    if missing:
        more = evaluate_run(out, overrides=runtime(task.config), only=missing, progress=progress)
        if accelerator.is_main_process:
            task.merge(result, {entry["view"]: entry for entry in more})
            write_result(out, result)
        accelerator.wait_for_everyone()
    return result
