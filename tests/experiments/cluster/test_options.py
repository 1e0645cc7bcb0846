"""Which clusters there are, and what a job gets."""

from __future__ import annotations

import sys

import pytest

from comrope.experiments.cluster import find_cluster
from comrope.experiments.cluster.options import slots
from comrope.experiments.common.errors import UserError


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("slrum", "", r"^cluster: .*did you mean slurm"),
        ("local", "timeout=3", r"^cluster-options: .*did you mean timeout_min"),
        ("local", "partition=gpu", r"^cluster-options: "),
        ("slurm", "gpus_per_node=all", r"^cluster-options: gpus_per_node: "),
        ("slurm", "partition", r"^cluster-options: "),
    ],
)
def test_what_no_cluster_has_is_refused(name, options, message, slurm):
    with pytest.raises(UserError, match=message):
        find_cluster(name, options)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"^cluster: .*sbatch"):
        find_cluster("slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"^cluster: .*'comrope\[cluster\]'"):
        find_cluster("local")


def test_a_job_has_a_process_for_each_gpu(slurm):
    text = "partition=a,b,timeout_min=600,gpus_per_node=4,nodes=2,cpus_per_task=8"
    found = find_cluster("slurm", text).parameters()
    assert found["slurm_partition"] == "a,b"
    assert (found["nodes"], found["gpus_per_node"], found["tasks_per_node"]) == (2, 4, 4)
    assert (found["timeout_min"], found["cpus_per_task"]) == (600, 8)
    assert "--cpus-per-task=8" in found["slurm_srun_args"]
    assert find_cluster("slurm").parameters()["tasks_per_node"] == 1
    assert find_cluster("slurm", "tasks_per_node=2").parameters()["tasks_per_node"] == 2


def test_local_jobs_share_the_cores(slurm, monkeypatch):
    eight = slots("cpu")[:1] * 8
    monkeypatch.setattr("comrope.experiments.cluster.options.slots", lambda device: eight)
    options = {"": 8, "cpus_per_task=4": 2, "cpus_per_task=16": 1, "gpus_per_node=1": 1}
    assert {text: find_cluster("local", text).most_jobs for text in options} == options
    assert find_cluster("slurm").most_jobs is None
