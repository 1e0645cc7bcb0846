"""Many runs: those that are missing, some on each GPU, or all GPUs for one after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

import torch

from comrope.experiments.common.console import progress_bar, say
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.config import Config
from comrope.experiments.data.cache import SIDE_BY_SIDE
from comrope.experiments.training.train import is_finished, train

__all__ = ["Job", "is_distributed", "relaunch_on_all_gpus", "run_all", "slots"]

WATCH_SECONDS = 2.0
MOST_ON_CPU = 8  # runs at a time, a GiB or more each


class Job(NamedTuple):
    """A run to train, and its folder."""

    config: Config
    folder: Path

    @property
    def start(self) -> Path | None:
        """The folder of the run that this one starts from."""
        start = self.config.train.start_from
        return None if start is None else Path(start)


class Slot(NamedTuple):
    """A place where one run at a time can go on: a GPU, or a few CPU threads."""

    gpu: int | None
    threads: int


def is_distributed() -> bool:
    """Whether this process is one of several that torchrun or accelerate launched."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def slots(device: str, per_gpu: int = 1) -> list[Slot]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus:
        threads = max(1, cores // (gpus * per_gpu))
        return [Slot(gpu, threads) for _ in range(per_gpu) for gpu in range(gpus)]
    count = min(cores, MOST_ON_CPU)
    return [Slot(None, cores // count) for _ in range(count)]


def relaunch_on_all_gpus(arguments: list[str]) -> None:
    """Become a torchrun of ``comrope`` with these arguments over all GPUs, if there are several."""
    gpus = torch.cuda.device_count()
    if gpus > 1 and not is_distributed():
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        os.execv(sys.executable, [sys.executable, *launch, "-m", "comrope", *arguments])


def run_all(tasks: list[Job], *, device: str, per_gpu: int = 1, progress: bool = True) -> None:
    """Finish every task, after the one that it starts from, ``per_gpu`` at a time on each GPU;
    errors of single runs are told when the others are through."""
    unique = {task.folder: task for task in tasks}.values()
    missing = _in_order([task for task in unique if not is_finished(task.config, task.folder)])
    if not missing:
        return
    done = len(unique) - len(missing)
    if done:
        say(f"{done} of {len(unique)} runs are there already")
    places = slots(device, per_gpu)[: len(missing)]
    if is_distributed() or len(places) == 1:
        for task in missing:
            train(task.config, task.folder, progress=progress)
        return
    failures = _in_processes(missing, places, progress)
    if failures:
        raise UserError("\n".join(failures))


def _in_order(tasks: list[Job]) -> list[Job]:
    """As they come, but every task after the one that it starts from."""
    ordered: list[Job] = []
    left = [*tasks]
    while left:
        folders = {task.folder for task in left}
        ready = next((task for task in left if task.start not in folders), None)
        if ready is None:
            raise UserError("train.start_from: runs that start from each other")
        ordered.append(ready)
        left.remove(ready)
    return ordered


def _in_processes(tasks: list[Job], places: list[Slot], progress: bool) -> list[str]:
    context = multiprocessing.get_context("spawn")
    board = Board(context.Queue(), context.Queue(), context.RawValue("b", 0))
    workers = [
        context.Process(target=_work, args=(slot, board, os.getpid(), len(places)), daemon=False)
        for slot in places
    ]
    for worker in workers:
        worker.start()

    def stop(number: int, _: Any) -> None:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        raise Interrupted("stopped; the runs have saved themselves, the same command goes on")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _collect(tasks, workers, board, progress)
    finally:
        board.complete.value = 1
        for worker in workers:
            worker.join()
        for number, handler in before.items():
            signal.signal(number, handler)


class Board(NamedTuple):
    """Between a study and its workers."""

    queue: Any  # tasks that may begin, with their numbers
    reports: Any  # numbers of those that have ended, with what went wrong
    complete: Any  # 1 when no more will be put on the queue; without a lock that could be left held


def _collect(tasks: list[Job], workers: list[Any], board: Board, progress: bool) -> list[str]:
    failures: list[str] = []
    left, waiting = set(range(len(tasks))), list(range(len(tasks)))
    with progress_bar(progress, "runs") as bar:
        bars = bar.add_task("runs", total=len(tasks), note="")
        while left:
            under_way = {tasks[number].folder for number in left}
            for number in [n for n in waiting if tasks[n].start not in under_way]:
                board.queue.put((number, tasks[number]))
                waiting.remove(number)
            if not waiting or any(worker.exitcode for worker in workers):
                board.complete.value = 1  # what waits for a run that was killed would wait forever
            try:
                number, error = board.reports.get(timeout=WATCH_SECONDS)
            except Empty:
                if any(worker.is_alive() for worker in workers):
                    continue
                names = ", ".join(tasks[number].folder.name for number in sorted(left))
                return [*failures, f"a process was killed; not finished: {names}"]
            left.discard(number)
            if error:
                failures.append(error)
            bar.update(bars, advance=1, note=tasks[number].folder.name)
    return failures


def _work(slot: Slot, board: Board, parent: int, workers: int) -> None:
    """The life of a worker: one run after the other in its slot."""
    os.environ[SIDE_BY_SIDE] = str(workers)
    if slot.gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(slot.gpu + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[slot.gpu]
    torch.set_num_threads(slot.threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the parent passes it on
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    while True:
        complete = board.complete.value  # asked first: whatever was put before that arrives in time
        try:
            number, task = board.queue.get(timeout=0.2)
        except Empty:
            if complete:
                return
            continue
        try:
            train(task.config, task.folder, progress=False)
            error = None
        except Interrupted:
            return
        except UserError as failure:
            error = f"{task.folder.name}: {failure}"
        except Exception as failure:  # the others go on
            error = f"{task.folder.name}: {type(failure).__name__}: {failure}"
        board.reports.put((number, error))


def _leave_with(parent: int) -> None:
    """Save and stop when the parent is gone: a run must not go on unseen."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
