"""The job of a run: submitted once, found again by later commands, and its state.

All files are in the run's folder, under ``.cluster``: job.json, submitit's files and the log.
submitit pickles what a job executes, and only that job reads the pickle. Here only JSON and text
are read.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from comrope._json import TEXT, Entries
from comrope.experiments.cluster.options import Cluster
from comrope.experiments.cluster.training_job import FAILURE, PLACE, TrainingJob
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_text
from comrope.experiments.common.json_files import read_json
from comrope.experiments.launch import Run

__all__ = ["SIGNALS", "ClusterJob", "failure_of", "job_of", "states_of"]

JOB, LOCK = "job.json", "lock"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
MOST_TIMEOUTS = 100  # after so many a job is not requeued: its run makes no progress
# Processes of local jobs: Python warns of a child that nothing refers to.
_local_jobs: list[Any] = []
atexit.register(_local_jobs.clear)


class ClusterJob(NamedTuple):
    """A submitted job, as job.json has it."""

    cluster: str
    id: str
    log: str


SCHEMA = Entries(dict.fromkeys(ClusterJob._fields, TEXT), others=None)
TO_SUBMIT = "remove the file to submit the run again, unless its job is still running"


def job_of(run: Run, cluster: Cluster) -> ClusterJob:
    """Return the job of a run that has not ended, or submit one.

    Raises:
        UserError: The cluster refuses the job, or does not answer.
    """
    place = run.folder / PLACE
    place.mkdir(parents=True, exist_ok=True)
    with (place / LOCK).open("w", encoding="utf-8") as file, _signals_blocked():
        fcntl.flock(file, fcntl.LOCK_EX)  # of two commands, one submits
        if (place / JOB).exists():
            job = ClusterJob(**read_json(place / JOB, SCHEMA, TO_SUBMIT))
            if job in states_of([job]):
                return job
        (place / FAILURE).unlink(missing_ok=True)
        job = _submit(run, place, cluster)
        write_text(place / JOB, json.dumps(job._asdict()) + "\n")
    return job


def failure_of(run: Run) -> str | None:
    """Return why the last job of a run failed, if the job could write it."""
    file = run.folder / PLACE / FAILURE
    return file.read_text(encoding="utf-8") if file.exists() else None


def states_of(jobs: Iterable[ClusterJob]) -> dict[ClusterJob, str]:
    """Return the states of those jobs that have not ended.

    Raises:
        UserError: Slurm does not answer.
    """
    jobs = [*jobs]
    found = {job: "running" for job in jobs if job.cluster == "local" and _is_running(job)}
    in_slurm = [job for job in jobs if job.cluster == "slurm"]
    if in_slurm:
        queue = _slurm_queue()
        found |= {job: queue[job.id] for job in in_slurm if job.id in queue}
    return found


def _submit(run: Run, place: Path, cluster: Cluster) -> ClusterJob:
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.AutoExecutor(
        folder=place,
        cluster=cluster.name,
        slurm_max_num_timeout=MOST_TIMEOUTS,
        local_max_num_timeout=MOST_TIMEOUTS,
    )
    try:
        executor.update_parameters(name=run.folder.name, **cluster.parameters())
        job = executor.submit(TrainingJob(run.config, run.folder, cluster.threads))
    except (FailedJobError, FailedSubmissionError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"cluster-options: {cluster.name} refused a job: {why}") from None
    if cluster.name == "local":
        _local_jobs.append(job)
    return ClusterJob(cluster.name, job.job_id, str(job.paths.stdout))


def _is_running(job: ClusterJob) -> bool:
    """Return whether the process of a local job exists; a later one may have the same number."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(int(job.id)).cmdline()[-1:] == [str(Path(job.log).parent)])
    return False


def _slurm_queue() -> dict[str, str]:
    """Return the states of this user's jobs by id.

    submitit asks sacct, which needs a database that not every Slurm has.
    """
    command = ["squeue", "--me", "--noheader", "--format=%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        raise UserError(f"cluster: squeue does not answer ({why})") from None
    states = (line.split() for line in done.stdout.splitlines())
    return {name: state.lower() for name, state in states}


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGTERM and Ctrl-C inside the block, for this process and those that it starts.

    A terminal's Ctrl-C reaches them all: it must neither cut off a submission nor end a local job.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
