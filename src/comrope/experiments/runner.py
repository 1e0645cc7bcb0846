"""Many runs: those that are missing, one on each GPU, or all GPUs for one after the other."""

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

from comrope.experiments.config import Config
from comrope.experiments.errors import Interrupted, UserError
from comrope.experiments.logs import progress_bar, say
from comrope.experiments.train import is_finished, train

__all__ = ["Task", "is_distributed", "relaunch_on_all_gpus", "run_all", "slots"]

WATCH_SECONDS = 2.0
MOST_ON_CPU = 8  # runs at a time, a GiB or more each


class Task(NamedTuple):
    config: Config
    folder: Path


class Slot(NamedTuple):
    """A place where one run at a time can go on: a GPU, or a few CPU threads."""

    gpu: int | None
    threads: int


def is_distributed() -> bool:
    """Whether this process is one of several that torchrun or accelerate launched."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def slots(device: str) -> list[Slot]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus:
        return [Slot(gpu, max(1, cores // gpus)) for gpu in range(gpus)]
    count = min(cores, MOST_ON_CPU)
    return [Slot(None, cores // count) for _ in range(count)]


def relaunch_on_all_gpus(arguments: list[str]) -> None:
    """Become a torchrun of ``comrope`` with these arguments over all GPUs, if there are several."""
    gpus = torch.cuda.device_count()
    if gpus > 1 and not is_distributed():
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        os.execv(sys.executable, [sys.executable, *launch, "-m", "comrope", *arguments])


def run_all(tasks: list[Task], *, device: str, progress: bool = True) -> None:
    """Finish every task; errors of single runs are told when the others are through."""
    unique = {task.folder: task for task in tasks}.values()
    missing = [task for task in unique if not is_finished(task.config, task.folder)]
    if not missing:
        return
    done = len(tasks) - len(missing)
    if done:
        say(f"{done} of {len(tasks)} runs are there already")
    places = slots(device)[: len(missing)]
    if is_distributed() or len(places) == 1:
        for task in missing:
            train(task.config, task.folder, progress=progress)
        return
    failures = _in_processes(missing, places, progress)
    if failures:
        raise UserError("\n".join(failures))


def _in_processes(tasks: list[Task], places: list[Slot], progress: bool) -> list[str]:
    context = multiprocessing.get_context("spawn")
    queue, reports = context.Queue(), context.Queue()
    for number, task in enumerate(tasks):
        queue.put((number, task))
    workers = [
        context.Process(target=_work, args=(slot, queue, reports, os.getpid()), daemon=False)
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
        return _collect(tasks, workers, reports, progress)
    finally:
        for worker in workers:
            worker.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _collect(tasks: list[Task], workers: list[Any], reports: Any, progress: bool) -> list[str]:
    failures: list[str] = []
    left = set(range(len(tasks)))
    with progress_bar(progress, "runs") as bar:
        bars = bar.add_task("runs", total=len(tasks), note="")
        while left:
            try:
                number, error = reports.get(timeout=WATCH_SECONDS)
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


def _work(slot: Slot, queue: Any, reports: Any, parent: int) -> None:
    """The life of a worker: one run after the other in its slot."""
    if slot.gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(slot.gpu + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[slot.gpu]
    torch.set_num_threads(slot.threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the parent passes it on
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    while True:
        try:
            number, task = queue.get(timeout=0.2)
        except Empty:
            return
        try:
            train(task.config, task.folder, progress=False)
            error = None
        except Interrupted:
            return
        except UserError as failure:
            error = f"{task.folder.name}: {failure}"
        except Exception as failure:  # the others go on
            error = f"{task.folder.name}: {type(failure).__name__}: {failure}"
        reports.put((number, error))


def _leave_with(parent: int) -> None:
    """Save and stop when the parent is gone: a run must not go on unseen."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
