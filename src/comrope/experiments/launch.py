"""Train several runs on this machine: side by side on its GPUs or cores, or one after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty
from types import FrameType
from typing import Any, NamedTuple

import torch

from comrope.experiments.common import interrupts
from comrope.experiments.common.console import progress_bar, say
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.config import Config
from comrope.experiments.data.cache import SIDE_BY_SIDE
from comrope.experiments.training.train import is_finished, train

__all__ = [
    "Run",
    "is_distributed",
    "missing_runs",
    "reason",
    "relaunch_on_all_gpus",
    "run_all",
    "slots",
]

WATCH_SECONDS = 2.0
MOST_ON_CPU = 8  # runs at a time, a GiB or more each


class Run(NamedTuple):
    """A run to train: its configuration and its folder."""

    config: Config
    folder: Path

    @property
    def start(self) -> Path | None:
        """The folder of the run that this one starts from."""
        start = self.config.train.start_from
        return None if start is None else Path(start)


class Slot(NamedTuple):
    """What a worker process trains on: a GPU, or a few CPU threads."""

    gpu: int | None
    threads: int


def is_distributed() -> bool:
    """Return whether this process is one of several that torchrun or accelerate launched."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def slots(device: str, per_gpu: int = 1) -> list[Slot]:
    """Return the slots of this machine.

    Args:
        device: "auto", or "cpu" for no GPU even if there is one.
        per_gpu: Slots on each GPU.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus:
        threads = max(1, cores // (gpus * per_gpu))
        return [Slot(gpu, threads) for _ in range(per_gpu) for gpu in range(gpus)]
    count = min(cores, MOST_ON_CPU)
    return [Slot(None, cores // count) for _ in range(count)]


def relaunch_on_all_gpus(arguments: list[str]) -> None:
    """Replace this process with torchrun over all GPUs, if there are several.

    Args:
        arguments: Of the command ``comrope``.
    """
    gpus = torch.cuda.device_count()
    if gpus > 1 and not is_distributed():
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        os.execv(sys.executable, [sys.executable, *launch, "-m", "comrope", *arguments])


def run_all(runs: Iterable[Run], *, device: str, per_gpu: int = 1, progress: bool = True) -> None:
    """Train every run that is not finished, each after the run that it starts from.

    Args:
        runs: The runs. Repeated folders count once.
        device: "auto" or "cpu".
        per_gpu: Runs at a time on each GPU.
        progress: Show progress bars.

    Raises:
        UserError: Some runs failed. The others have finished.
        Interrupted: A signal asked to stop. Unfinished runs have saved themselves.
    """
    missing = missing_runs(runs)
    if not missing:
        return
    places = slots(device, per_gpu)[: len(missing)]
    if is_distributed() or len(places) == 1:
        for run in missing:
            train(run.config, run.folder, progress=progress)
        return
    failures = _in_processes(missing, places, progress)
    if failures:
        raise UserError("\n".join(failures))


def missing_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs that are not finished, each after the one that it starts from.

    Raises:
        UserError: Runs start from each other.
    """
    unique = {run.folder: run for run in runs}.values()
    missing = _in_order([run for run in unique if not is_finished(run.config, run.folder)])
    finished = len(unique) - len(missing)
    if finished and missing:
        say(f"{finished} of {len(unique)} runs are finished already")
    return missing


def reason(error: Exception) -> str:
    """Return why a run failed, with the kind of error unless it is the user's."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _in_order(runs: list[Run]) -> list[Run]:
    """Move every run behind the one that it starts from; keep the order otherwise."""
    ordered: list[Run] = []
    left = [*runs]
    while left:
        folders = {run.folder for run in left}
        ready = next((run for run in left if run.start not in folders), None)
        if ready is None:
            raise UserError("train.start_from: runs that start from each other")
        ordered.append(ready)
        left.remove(ready)
    return ordered


class Queues(NamedTuple):
    """What this process and its workers share."""

    runs: Any  # (number, run) of runs that may begin
    reports: Any  # (number, failure or None) of runs that have ended
    complete: Any  # 1 if no run will be added; without a lock, which a killed worker could hold


def _in_processes(runs: list[Run], places: list[Slot], progress: bool) -> list[str]:
    """Train runs in worker processes, one for each slot; return the failures."""
    context = multiprocessing.get_context("spawn")
    queues = Queues(context.Queue(), context.Queue(), context.RawValue("b", 0))
    workers = [
        context.Process(target=_work, args=(slot, queues, os.getpid(), len(places)), daemon=False)
        for slot in places
    ]
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            if number == signal.SIGINT:
                interrupts.interrupt(number, frame)  # without waiting for the runs
            return
        stopped = True
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        raise Interrupted(
            "stopped; the runs have saved themselves, the same command continues", number
        )

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _start(workers)
        return _collect(runs, workers, queues, progress)
    finally:
        queues.complete.value = 1
        try:
            for worker in workers:
                if worker.pid is not None:
                    worker.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _start(workers: list[Any]) -> None:
    """Start processes that a terminal's Ctrl-C does not reach: this one passes it on."""
    resource_tracker.ensure_running()  # it would unblock what is blocked below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(runs: list[Run], workers: list[Any], queues: Queues, progress: bool) -> list[str]:
    """Pass runs to the workers, wait until all have ended, and return the failures."""
    failures: list[str] = []
    left, waiting = set(range(len(runs))), list(range(len(runs)))
    with progress_bar(progress, "runs") as bar:
        row = bar.add_task("runs", total=len(runs), note="")
        while left:
            unfinished = {runs[number].folder for number in left}
            for number in [n for n in waiting if runs[n].start not in unfinished]:
                queues.runs.put((number, runs[number]))
                waiting.remove(number)
            if not waiting or any(worker.exitcode for worker in workers):
                queues.complete.value = 1  # a run that waits for a killed one would wait forever
            try:
                number, failure = queues.reports.get(timeout=WATCH_SECONDS)
            except Empty:
                if any(worker.is_alive() for worker in workers):
                    continue
                names = ", ".join(runs[number].folder.name for number in sorted(left))
                return [*failures, f"a process was killed; not finished: {names}"]
            left.discard(number)
            if failure:
                failures.append(failure)
            bar.update(row, advance=1, note=runs[number].folder.name)
    return failures


def _work(slot: Slot, queues: Queues, parent: int, workers: int) -> None:
    """Train one run after the other in a slot: the main function of a worker process."""
    os.environ[SIDE_BY_SIDE] = str(workers)
    if slot.gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(slot.gpu + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[slot.gpu]
    torch.set_num_threads(slot.threads)
    threading.Thread(target=_stop_without, args=(parent,), daemon=True).start()
    while True:
        complete = queues.complete.value  # read first: what was put before it arrives in time
        try:
            number, run = queues.runs.get(timeout=0.2)
        except Empty:
            if complete:
                return
            continue
        try:
            train(run.config, run.folder, progress=False)
            failure = None
        except Interrupted:
            return
        except Exception as error:  # the other runs continue
            failure = f"{run.folder.name}: {reason(error)}"
        queues.reports.put((number, failure))


def _stop_without(parent: int) -> None:
    """Save and stop when the parent process is gone: no run trains unattended."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
