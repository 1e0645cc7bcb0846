"""A command that waits for jobs: what it submits, reports and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from support.jobs import events, job_file, processes_of, submissions, wait_for
from support.toy import curve

from comrope.experiments.cluster import find_cluster, run_on_cluster, wait
from comrope.experiments.cluster.jobs import ClusterJob
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.launch import Run

LOCAL = find_cluster("local")
STUDY = ("reproduce", "classification", "model.name=vit_nano_patch4_12", "train.epochs=4",
         "train.log_every=1", "evaluate.resolutions=12", "--methods", "ape,rope", "--seeds", "1",
         "--quiet", "--cluster", "local")  # fmt: skip
LONG = {"train__epochs": 300, "train__log_every": 50, "train__checkpoint_every": 50}


def test_a_signal_ends_only_the_waiting(tmp_path, monkeypatch):
    run, later = (
        Run(curve(), tmp_path / "a"),
        Run(curve(train__start_from=str(tmp_path / "a")), tmp_path / "b"),
    )
    job = ClusterJob("local", "12", "log")

    def states(of):
        os.kill(os.getpid(), signal.SIGTERM)
        return dict.fromkeys(of, "running")

    monkeypatch.setattr(wait, "states_of", states)
    monkeypatch.setattr(wait, "job_of", lambda *_: job)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        run_on_cluster([run, later], LOCAL, progress=False)
    assert signal.getsignal(signal.SIGTERM) is before


def test_while_slurm_does_not_answer_no_run_is_given_up(tmp_path, monkeypatch):
    """A fake Slurm: two answers fail, then the job has ended and the run is there."""
    run = Run(curve(), tmp_path / "run")
    job, asked = ClusterJob("slurm", "12", "log"), []

    def states(of):
        asked.append([*of])
        if len(asked) in (2, 3):
            raise UserError("cluster: squeue does not answer")
        return {}

    monkeypatch.setattr(wait, "states_of", states)
    monkeypatch.setattr(wait, "job_of", lambda *_: job)
    monkeypatch.setattr(wait, "is_finished", lambda *_: len(asked) > 3)
    monkeypatch.setitem(wait.POLL_SECONDS, "local", 0)
    monkeypatch.setitem(wait.GRACE_SECONDS, "slurm", 0)
    monkeypatch.setattr(wait, "missing_runs", lambda runs: [*runs])
    run_on_cluster([run], LOCAL, progress=False)
    assert asked == [[], [job], [job], [job]]


@pytest.mark.slow
def test_runs_wait_for_what_they_start_from_and_failures_are_named(tmp_path):
    starts = {"from-good": "good", "from-bad": "bad", "good": None, "bad": "nowhere"}
    configs = {
        name: curve(train__start_from=start and str(tmp_path / start))
        for name, start in starts.items()
    }
    runs = [Run(config, tmp_path / name) for name, config in configs.items()]
    with pytest.raises(UserError) as caught:
        run_on_cluster(runs, LOCAL, progress=False)
    bad, child = str(caught.value).splitlines()
    log = job_file(runs[3])["log"]
    nowhere = f"train.start_from: {tmp_path}/nowhere holds no run (no config.yaml)"
    assert bad == f"bad: {nowhere}; log: {log}"
    assert child.startswith("from-bad: not started, ")
    assert nowhere in Path(log).read_text()
    assert (tmp_path / "from-good" / "result.json").exists()
    run_on_cluster([runs[0], runs[2]], LOCAL, progress=False)  # finished: no jobs
    assert [submissions(run) for run in runs] == [1, 0, 1, 1]


@pytest.mark.slow
def test_a_job_that_is_killed_is_named_and_the_same_command_submits_another(tmp_path):
    run = Run(curve(**LONG), tmp_path / "run")

    def kill():
        wait_for(lambda: list((run.folder / "checkpoints").glob("step-*")))
        (process,) = processes_of(run)
        process.parent().kill()
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(UserError) as caught:
        run_on_cluster([run], LOCAL, progress=False)
    killer.join()
    first = job_file(run)
    assert str(caught.value).endswith(f"log: {first['log']}")
    run_on_cluster([run], LOCAL, progress=False)
    assert job_file(run)["id"] != first["id"]
    assert "resumed" in events(run.folder)


@pytest.mark.slow
def test_jobs_go_on_without_the_command_and_the_next_one_waits_for_them(tmp_path):
    command = [sys.executable, "-m", "comrope", *STUDY, "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as waiting:
        wait_for(lambda: list(tmp_path.glob("runs/*/log.jsonl")))
        os.killpg(waiting.pid, signal.SIGINT)  # as a terminal does
        said = waiting.communicate(timeout=60)[1]
    assert waiting.returncode == 130, said
    assert "Traceback" not in said
    before = {file: file.read_text() for file in tmp_path.glob("runs/*/.cluster/job.json")}
    running = [json.loads(text)["id"] for text in before.values()]
    assert running
    assert all(name in said and psutil.pid_exists(int(name)) for name in running)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert {file: file.read_text() for file in before} == before
    (results,) = tmp_path.glob("classification-*/results.json")
    assert len(json.loads(results.read_text())["rows"]) == 2
