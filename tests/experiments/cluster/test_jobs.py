"""The job of a run: there is one, and its state is known."""

from __future__ import annotations

import os
import subprocess

import pytest
from support.jobs import submissions, wait_for
from support.toy import curve

from comrope.experiments.cluster import find_cluster, jobs
from comrope.experiments.cluster.jobs import ClusterJob, failure_of, job_of, states_of
from comrope.experiments.common.errors import UserError
from comrope.experiments.launch import Run


def test_slurm_is_asked_for_the_jobs_that_have_not_ended(monkeypatch):
    job, ended = ClusterJob("slurm", "12", ""), ClusterJob("slurm", "1", "")
    queue = subprocess.CompletedProcess([], 0, stdout="12 RUNNING\n13 PENDING\n", stderr="")
    monkeypatch.setattr(jobs.subprocess, "run", lambda *_, **__: queue)
    assert states_of([job, ended]) == {job: "running"}

    def fail(*_, **__):
        raise subprocess.CalledProcessError(1, "squeue", stderr="Unable to contact controller")

    monkeypatch.setattr(jobs.subprocess, "run", fail)
    with pytest.raises(UserError, match=r"^cluster: .*Unable to contact"):
        states_of([job])


def test_another_process_with_the_number_of_a_job_is_not_the_job(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as other:
        job = ClusterJob("local", str(other.pid), str(tmp_path / "log"))
        assert states_of([job]) == {}
        other.terminate()


def test_why_a_cluster_refuses_a_job_is_one_line(tmp_path, slurm, monkeypatch):
    """A fake Slurm, by its commands."""
    for name in ("sbatch", "srun"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\necho 'sbatch: error: no such\npartition' >&2; exit 1\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cluster = find_cluster("slurm", "partition=nosuch")
    with pytest.raises(UserError, match=r"^cluster-options: .*no such partition$"):
        job_of(Run(curve(), tmp_path / "run"), cluster)
    assert not (tmp_path / "run" / ".cluster" / "job.json").exists()


@pytest.mark.slow
def test_a_run_has_one_job_until_that_has_ended(tmp_path):
    run, cluster = Run(curve(train__start_from="nowhere"), tmp_path / "run"), find_cluster("local")
    job = job_of(run, cluster)
    assert job_of(run, cluster) == job
    wait_for(lambda: not states_of([job]))
    assert failure_of(run).startswith("train.start_from: ")
    other = job_of(run, cluster)
    assert other != job
    assert failure_of(run) is None
    assert submissions(run) == 2
    wait_for(lambda: not states_of([other]))
