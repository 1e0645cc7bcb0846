"""Processes that load: where they come from, what they share with the training process, how they
end.

They are forked from a server that has imported what they need and nothing else happened in: a copy
of the training process, with its threads and its GPU, would be slow to make and unsafe.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch.utils.data import DataLoader

from comrope.experiments.common.errors import UserError

__all__ = ["SIDE_BY_SIDE", "Kept", "create_loader", "end", "start", "start_server"]

# What is imported once, by the server. The command line is for `comrope`: as the main module it is
# looked at by every process.
PRELOAD = ("comrope.experiments.data.batches", "comrope.experiments.cli", "timm.data")
WATCH_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CAN_WAIT = hasattr(signal, "sigtimedwait")  # macOS cannot
SAMPLE = 32  # items, spread over all, from which the memory of all is estimated
SIDE_BY_SIDE = "COMROPE_SIDE_BY_SIDE"  # how many runs share this machine's memory
SHARE = 0.8  # of the memory there is: training wants the rest


def start_server(workers: int = 1) -> None:
    """Have the imports of loading processes done meanwhile, if there will be some."""
    if not workers:
        return
    forkserver.set_forkserver_preload(list(PRELOAD))
    resource_tracker.ensure_running()  # which would unblock what is blocked below
    # A terminal's Ctrl-C and a scheduler's SIGTERM go to all processes of a job, but they are for
    # the training process: the others end with it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LoadingProcess(ForkServerProcess):
    """One that ends when the training process is gone, or says so, and for nobody else.

    A training process that is told to stop still wants batches: it ends the step, saves, and ends
    those that load. (torch's would look for a parent that is gone too, but that is the server here,
    which stays as long as one of its processes does.)
    """

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if not CAN_WAIT:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


class LoadingContext(ForkServerContext):
    Process = LoadingProcess


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    told = None
    while parent.is_alive() and (told is None or told.si_pid != parent.pid):
        if CAN_WAIT:
            told = signal.sigtimedwait({signal.SIGTERM}, WATCH_SECONDS)
        else:
            parent.join(WATCH_SECONDS)
    os._exit(0)


def _hear_signals(_: Any) -> None:
    """In a process of the server that is none of those, and would not expect to be deaf."""
    process = multiprocessing.current_process()
    from_server = forkserver.get_inherited_fds() is not None
    if from_server and not isinstance(process, LoadingProcess):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


# The server imports this; processes that it forks call it before they begin their work.
multiprocessing.util.register_after_fork(_hear_signals, _hear_signals)


def create_loader(
    images: Any,
    keys: Any,
    collate: Callable[[list[Any]], Any],
    *,
    workers: int,
    pin_memory: bool,
    persistent: bool = False,
) -> DataLoader[Any]:
    """Batches of ``images`` by their ``keys``. ``start`` it, rather than iterate over it."""
    workers = min(workers, os.cpu_count() or 1)
    return DataLoader(
        images,
        batch_sampler=keys,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
        multiprocessing_context=LoadingContext() if workers else None,
        persistent_workers=persistent and workers > 0,
    )


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its batches, whose processes have started: all of them, as torch cannot end some."""
    start_server(loader.num_workers)
    with _uninterrupted():
        return iter(loader)


def end(batches: Iterator[Any] | None) -> None:
    """End the processes that load them. Whoever keeps the batches would keep those."""
    shutdown = getattr(batches, "_shutdown_workers", None)  # none without processes
    if shutdown is not None:
        shutdown()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals come when it is over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


class Kept:
    """Pictures of many items, decoded once, in memory that loading processes share.

    It is a file without a name that grows as pictures come. Processes are given the file, not what
    is in it. (torch's shared memory is in /dev/shm, which containers keep small.)
    """

    def __init__(
        self, count: int, decode: Callable[[int], tuple[int, Sequence[Any]]], what: str
    ) -> None:
        """``decode`` makes of an item its pictures, and one number to be kept with them."""
        self.count, self.size = count, 0
        self.errors: dict[int, str] = {}
        self._keep(_memory_file())
        items = np.zeros((count, 3), np.int64)
        places = array("q")

        def attempt(index: int) -> tuple[int, list[Any]] | str:
            try:
                number, pictures = decode(index)
                return number, [np.asarray(picture) for picture in pictures]
            except Exception as error:
                return str(error)

        def add(indices: Sequence[int]) -> None:
            for index, found in zip(indices, pool.map(attempt, indices), strict=True):
                if isinstance(found, str):
                    self.errors[index] = found
                    continue
                number, pictures = found
                items[index] = number, len(places) // 4, len(pictures)
                for pixels in pictures:
                    places.extend((self.size, *pixels.shape, *(0,) * (3 - pixels.ndim)))
                    self.size += self.file.write(np.ascontiguousarray(pixels).data)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            few = range(0, count, max(1, count // SAMPLE))
            add(few)
            _check_memory(self.size / max(1, len(few) - len(self.errors)), count, what)
            add([index for index in range(count) if index not in few])
        self.file.write(bytes(-self.size % 8) + items.tobytes() + places.tobytes())
        self.file.flush()
        self._map()

    def load(self, index: int) -> tuple[int, int]:
        """The number that is kept with an item, and how many pictures it has; its error if it has
        none."""
        if index in self.errors:
            raise ValueError(self.errors[index])
        number, _, pictures = self.items[index].tolist()
        return number, pictures

    def picture(self, index: int, number: int = 0) -> np.ndarray:
        first, *sizes = self.places[self.items[index, 1] + number].tolist()
        shape = [size for size in sizes if size]
        return self.memory[first : first + math.prod(shape)].reshape(shape)

    def _keep(self, file: BinaryIO) -> None:
        self.file = file
        weakref.finalize(self, file.close)

    def _map(self) -> None:
        mapped = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.memory = np.frombuffer(mapped, np.uint8)
        tables = self.memory[self.size + -self.size % 8 :].view(np.int64)
        self.items = tables[: 3 * self.count].reshape(-1, 3)
        self.places = tables[3 * self.count :].reshape(-1, 4)

    def __getstate__(self) -> dict[str, Any]:
        known = {"count": self.count, "size": self.size, "errors": self.errors}
        return {**known, "file": reduction.DupFd(self.file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.count, self.size, self.errors = state["count"], state["size"], state["errors"]
        self._keep(os.fdopen(state["file"].detach(), "rb"))
        self._map()


def _memory_file() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("comrope"), "wb")
    return tempfile.TemporaryFile()


def _check_memory(each: float, count: int, what: str) -> None:
    """Raise unless there is room for all, if they are like those that were measured."""
    # Every process keeps all: those of a run, and of runs beside it (see runner.py).
    names = ("LOCAL_WORLD_SIZE", SIDE_BY_SIDE)
    processes = math.prod(int(os.environ.get(name, "1")) for name in names)
    needed, there = each * count * processes, _memory()
    if needed > SHARE * there:
        raise UserError(
            f"data.cache: {count} {what} would need about {needed / 2**30:.1f} GiB of memory, "
            f"expected at most {SHARE:.0%} of the {there / 2**30:.1f} GiB there are; "
            "data.cache=false would decode them on demand"
        )


def _memory() -> int:
    """The bytes that are available; of a container no more than it is allowed."""
    import psutil

    there = int(psutil.virtual_memory().available)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            there = min(there, int(Path("/sys/fs/cgroup", limit).read_text()))
    return there
