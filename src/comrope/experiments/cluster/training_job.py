"""What a job executes: a run, which saves itself before its job is requeued."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch

from comrope.experiments.common.distributed import broadcast, create_accelerator
from comrope.experiments.common.errors import Interrupted
from comrope.experiments.common.files import write_text
from comrope.experiments.config import Config
from comrope.experiments.data.workers import start_server
from comrope.experiments.launch import reason
from comrope.experiments.training.train import train

__all__ = ["FAILURE", "PLACE", "TrainingJob"]

PLACE, FAILURE = ".cluster", "failure.txt"  # folder in that of the run, and a file in it


class TrainingJob:
    """Train a run in a job, with one process for each of its tasks.

    submitit pickles this object, and calls it again whenever the job was requeued. Before the time
    of a job is over it gets a signal (SIGUSR2), at which submitit requeues the job; here the run
    first finishes its step and saves itself. At SIGTERM alone it saves itself and continues: either
    the job is killed next, or there was no need to stop.

    Args:
        config: The configuration of the run.
        folder: The folder of the run.
        threads: CPU threads of a process; by default as torch chooses.
    """

    def __init__(self, config: Config, folder: Path, threads: int | None = None) -> None:
        self.config, self.folder, self.threads = config, folder, threads

    def __call__(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            self._train()
        except Exception as error:
            write_text(self.folder / PLACE / FAILURE, reason(error))
            raise

    def checkpoint(self) -> Any:
        """Return what the requeued job executes: the same object, which resumes the run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _train(self) -> None:
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
        # Only this process handles signals. Those that load data inherit the mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, {number, signal.SIGINT})
        start_server(self.config.data.workers)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number, signal.SIGTERM})
        if JobEnvironment().num_tasks > 1:
            TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        requeue: Any = signal.getsignal(number)  # submitit's; it ends the first process
        idle = signal.getsignal(signal.SIGTERM)
        asked = False

        def ask(*_: Any) -> None:
            nonlocal asked
            if signal.getsignal(signal.SIGTERM) == idle:
                requeue(number, None)  # no step to finish
            asked = True
            signal.raise_signal(signal.SIGTERM)

        signal.signal(number, ask)
        while True:
            try:
                train(self.config, self.folder, progress=False)
                return
            except Interrupted:
                accelerator = create_accelerator(self.config.train.device)
                if broadcast(accelerator, asked):  # the first process decides for all
                    requeue(number, None)
                    return
