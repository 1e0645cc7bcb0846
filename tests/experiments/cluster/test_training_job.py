"""A job that must make way: its run saves itself, and ends as if it had not been interrupted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.jobs import events, job_file, processes_of, submissions, wait_for
from support.runs import same, weights
from support.toy import curve

from comrope.experiments.cluster import find_cluster, run_on_cluster
from comrope.experiments.cluster.jobs import job_of
from comrope.experiments.launch import Run
from comrope.experiments.training.train import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
LOCAL = find_cluster("local")
# Saved only when it is asked to stop; a process of its own loads the data.
CONFIG = curve(
    train__epochs=250, train__log_every=50, train__checkpoint_every=10_000, data__workers=1
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, one_thread) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(CONFIG, folder, progress=False)
    return folder


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_preempted_job_resumes_exactly(number, tmp_path, uninterrupted):
    """SIGUSR2 requeues it; after SIGTERM alone it continues, having saved itself."""
    run = Run(CONFIG, tmp_path / "run")
    job = job_of(run, LOCAL)
    wait_for(lambda: "train" in events(run.folder))
    (process,) = processes_of(run)
    for each in (process, *process.children(recursive=True)):  # as Slurm does
        each.send_signal(number)
    wait_for(lambda: "resumed" in events(run.folder))
    assert ([p.pid for p in processes_of(run)] == [process.pid]) == (number == signal.SIGTERM)
    assert job_of(run, LOCAL) == job
    run_on_cluster([run], LOCAL, progress=False)
    assert job_file(run)["id"] == job.id
    assert submissions(run) == 1
    assert same(weights(run.folder), weights(uninterrupted))


def test_several_processes_train_one_run_and_are_requeued_together(tmp_path):
    run = Run(CONFIG.with_overrides({"train.epochs": 120}), tmp_path / "run")
    cluster = find_cluster("local", "tasks_per_node=2,cpus_per_task=1")
    job_of(run, cluster)
    wait_for(lambda: "train" in events(run.folder))
    first = processes_of(run)
    assert len(first) == 2
    for process in first:
        process.send_signal(signal.SIGUSR2)
    run_on_cluster([run], cluster, progress=False)
    assert "resumed" in events(run.folder)
    assert submissions(run) == 1
    assert json.loads((run.folder / "result.json").read_text())["processes"] == 2
