"""Submit runs as soon as they can begin, and wait until all their jobs have ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from comrope.experiments.cluster.jobs import SIGNALS, ClusterJob, failure_of, job_of, states_of
from comrope.experiments.cluster.options import Cluster
from comrope.experiments.common.console import progress_bar, say
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.launch import Run, missing_runs
from comrope.experiments.training.train import is_finished

__all__ = ["run_on_cluster"]

POLL_SECONDS = {"slurm": 10.0, "local": 1.0}
GRACE_SECONDS = {"slurm": 15.0, "local": 1.0}  # until a shared file system shows what a job wrote


def run_on_cluster(runs: Iterable[Run], cluster: Cluster, *, progress: bool = True) -> None:
    """Train every run that is not finished, each in a job, and wait until all have ended.

    A run is submitted when the run that it starts from has finished. A run that has a job from an
    earlier command is not submitted again.

    Args:
        runs: The runs. Repeated folders count once.
        cluster: Where jobs are executed, and what they get.
        progress: Show a progress bar, and a line for each job.

    Raises:
        UserError: Some runs failed. The others have finished.
        Interrupted: A signal asked to stop waiting. The jobs continue.
    """
    missing = missing_runs(runs)
    if not missing:
        return
    with _signals_noted() as received:
        failures = _Wait(missing, cluster, received, progress).until_all_ended()
    if failures:
        raise UserError("\n".join(failures))


class _Wait:
    """The state of a command that waits.

    Args:
        runs: Unfinished runs, each after the one that it starts from.
        cluster: Where they are submitted.
        received: Signals that asked to stop.
        progress: Show progress.
    """

    def __init__(
        self, runs: list[Run], cluster: Cluster, received: list[int], progress: bool
    ) -> None:
        self.cluster, self.received, self.progress = cluster, received, progress
        self.waiting = [*runs]  # not submitted yet
        self.jobs: dict[Path, tuple[Run, ClusterJob]] = {}  # by the folder of the run
        self.gone: dict[Path, float] = {}  # since when a job is not in the queue
        self.failures: dict[Path, str] = {}

    def until_all_ended(self) -> list[str]:
        """Return the failures, a line each."""
        total = len(self.waiting)
        with progress_bar(self.progress, "runs") as bar:
            row = bar.add_task("runs", total=total, note="")
            while True:
                states = self._states()
                if states is not None:
                    self._collect(states)
                self._submit()
                left = len(self.waiting) + len(self.jobs)
                bar.update(row, completed=total - left, note=_count(states or {}))
                if not left:
                    return [*self.failures.values()]
                self._pause()

    def _states(self) -> dict[ClusterJob, str] | None:
        """Return the states of the jobs that have not ended; None if there was no answer."""
        try:
            return states_of(job for _, job in self.jobs.values())
        except UserError as error:
            say(f"{error}; asking again")
            return None

    def _collect(self, states: Mapping[ClusterJob, str]) -> None:
        """Remove the runs whose jobs have ended."""
        for folder, (run, job) in list(self.jobs.items()):
            if job in states:
                self.gone.pop(folder, None)
                continue
            since = self.gone.setdefault(folder, time.monotonic())
            if not is_finished(run.config, folder):
                failure = failure_of(run)
                if failure is None and time.monotonic() - since < GRACE_SECONDS[job.cluster]:
                    continue
                self._fail(run, f"{failure or 'the job ended before the run'}; log: {job.log}")
            del self.jobs[folder]

    def _submit(self) -> None:
        """Submit the runs that can begin; those that start from a failed run fail, too."""
        for run in list(self.waiting):
            self._check_received()
            unfinished = {*self.jobs, *(other.folder for other in self.waiting)}
            if run.start in self.failures:
                self._fail(run, f"not started, since it starts from {run.start.name}")
            elif run.start not in unfinished and self._has_place():
                try:
                    job = job_of(run, self.cluster)
                except UserError as error:
                    raise UserError(f"{error}; {self._rest()}") from None
                self.jobs[run.folder] = run, job
                if self.progress:
                    say(f"{job.cluster} job {job.id}: {run.folder.name}")
            else:
                continue
            self.waiting.remove(run)

    def _has_place(self) -> bool:
        return self.cluster.most_jobs is None or len(self.jobs) < self.cluster.most_jobs

    def _fail(self, run: Run, why: str) -> None:
        self.failures[run.folder] = f"{run.folder.name}: {why}"

    def _pause(self) -> None:
        until = time.monotonic() + POLL_SECONDS[self.cluster.name]
        while time.monotonic() < until:
            self._check_received()
            time.sleep(0.2)

    def _check_received(self) -> None:
        if self.received:
            raise Interrupted(f"stopped waiting; {self._rest()}", self.received[0])

    def _rest(self) -> str:
        """Return what continues without this command, and what does not."""
        ids = ", ".join(job.id for _, job in self.jobs.values()) or "none"
        return (
            f"jobs that continue: {ids}; runs without a job: {len(self.waiting)}. The same command "
            "waits for the jobs and submits the rest"
        )


def _count(states: Mapping[ClusterJob, str]) -> str:
    """Return how many jobs are in each state."""
    found = [*states.values()]
    return ", ".join(f"{found.count(state)} {state}" for state in sorted({*found}))


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Give a list to which SIGTERM and Ctrl-C are added, instead of what they do otherwise."""
    received: list[int] = []
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
