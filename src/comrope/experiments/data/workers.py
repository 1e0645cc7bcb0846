"""Loading processes: their start, their signals, their end.

They are forked from a server process that has only imported modules. A fork of the training
process, with its threads and its GPU, would be slow and unsafe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.pool import Pool
from typing import Any

from torch.utils.data import DataLoader

from comrope.experiments.common.errors import UserError

__all__ = ["create_loader", "create_pool", "end", "signals_delayed", "start", "start_server"]

PACKAGE = __name__.partition(".")[0]
PRELOAD = ("timm.data",)  # imported by the server, in addition to this package's used modules
WATCH_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CAN_WAIT = hasattr(signal, "sigtimedwait")  # macOS cannot
SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # folders for sockets
LONGEST = 70  # bytes of such a folder: names of sockets have 103 to 107, and 32 are added


def start_server(workers: int = 1) -> None:
    """Start the server that loading processes are forked from, unless ``workers`` is 0.

    It imports all modules of this package that this process has imported, because every loading
    process needs them (also the command line, which is its main module).
    """
    if not workers:
        return
    _choose_socket_folder()
    own = [name for name in sorted(sys.modules) if name.startswith(f"{PACKAGE}.")]
    forkserver.set_forkserver_preload([*PRELOAD, *own])
    resource_tracker.ensure_running()  # it would unblock what is blocked below
    # A terminal's Ctrl-C and a scheduler's SIGTERM go to all processes of a job, but only the
    # training process handles them: the others end with it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _choose_socket_folder() -> None:
    """Let multiprocessing place its sockets in a short folder, if that for temporary files is long.

    Raises:
        UserError: There is no such folder.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST:
        return
    for folder in SHORT:
        tempfile.tempdir = folder
        try:
            multiprocessing.util.get_temp_dir()  # created once, and then used by all processes
            return
        except OSError:
            pass
        finally:
            tempfile.tempdir = usual
    raise UserError(
        f"TMPDIR: {usual} is too long for the sockets of loading processes; expected at most "
        f"{LONGEST} bytes. Set a shorter one, or data.workers=0"
    )


class LoadingProcess(ForkServerProcess):
    """A process that ends only with the training process, or when that process ends it.

    A training process that gets a signal still needs batches: it finishes the step, saves, and ends
    the loading processes. (torch watches the parent process, but here that is the server, which
    runs as long as any of its processes.)
    """

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if not CAN_WAIT:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


class LoadingContext(ForkServerContext):
    Process = LoadingProcess


class PoolProcess(ForkServerProcess):
    """A process of a pool: it ends with SIGTERM, when the pool does, but not with Ctrl-C."""


class PoolContext(ForkServerContext):
    Process = PoolProcess


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    received = None
    while parent.is_alive() and (received is None or received.si_pid != parent.pid):
        if CAN_WAIT:
            received = signal.sigtimedwait({signal.SIGTERM}, WATCH_SECONDS)
        else:
            parent.join(WATCH_SECONDS)
    os._exit(0)


def _unblock_signals(_: Any) -> None:
    """Unblock signals in other processes of the server, such as those of a pool."""
    process = multiprocessing.current_process()
    from_server = forkserver.get_inherited_fds() is not None
    if from_server and not isinstance(process, LoadingProcess):
        numbers = (signal.SIGTERM,) if isinstance(process, PoolProcess) else SIGNALS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


# The server imports this module; the processes that it forks call the function before their work.
multiprocessing.util.register_after_fork(_unblock_signals, _unblock_signals)


def create_pool(processes: int) -> Pool:
    """Return a pool of processes that have imported what this one has.

    Args:
        processes: Their number, at most one per CPU.
    """
    start_server()
    return PoolContext().Pool(min(processes, os.cpu_count() or 1))


def create_loader(
    dataset: Any,
    keys: Any,
    collate: Callable[[list[Any]], Any],
    *,
    workers: int,
    pin_memory: bool,
    persistent: bool = False,
) -> DataLoader[Any]:
    """Return a loader of batches; call ``start`` to iterate over it.

    Args:
        dataset: The samples, by key.
        keys: The keys of each batch.
        collate: Function from a list of samples to a batch.
        workers: Loading processes, at most one per CPU; 0 loads in this process.
        pin_memory: Whether batches are in pinned memory, for copies to a GPU.
        persistent: Whether the processes are kept for the next pass.
    """
    workers = min(workers, os.cpu_count() or 1)
    return DataLoader(
        dataset,
        batch_sampler=keys,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
        multiprocessing_context=LoadingContext() if workers else None,
        persistent_workers=persistent and workers > 0,
    )


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start all processes of a loader and return its batches.

    Signals wait until all processes run, because torch cannot end only some of them.
    """
    start_server(loader.num_workers)
    with signals_delayed():
        return iter(loader)


def end(batches: Iterator[Any] | None) -> None:
    """End the loading processes of some batches."""
    shutdown = getattr(batches, "_shutdown_workers", None)  # none without processes
    if shutdown is not None:
        shutdown()


@contextlib.contextmanager
def signals_delayed() -> Iterator[None]:
    """Delay the handling of signals until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # the main thread handles signals
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
