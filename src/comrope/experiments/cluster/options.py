"""Which cluster, and what each of its jobs gets: a few parameters of submitit, by its names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import shown
from comrope.experiments.config.bounds import Bounds
from comrope.experiments.config.build import Text, checked, suggest
from comrope.experiments.launch import slots

__all__ = ["Cluster", "find_cluster"]

CLUSTERS = ("slurm", "local")
MOST = 100_000  # of any number: minutes of 69 days, gigabytes of memory, processes
COUNT, NUMBER = (int, Bounds(minimum=1, maximum=MOST)), (float, Bounds(maximum=MOST))
FROM_0, TEXT = (int, Bounds(maximum=MOST)), (str, Bounds(shortest=1))
SHARED = {
    "timeout_min": COUNT, "mem_gb": NUMBER, "nodes": COUNT, "cpus_per_task": COUNT,
    "gpus_per_node": FROM_0, "tasks_per_node": COUNT,
}  # fmt: skip
OF_SLURM = {
    "partition": TEXT, "account": TEXT, "qos": TEXT, "constraint": TEXT, "gres": TEXT,
    "exclude": TEXT, "signal_delay_s": FROM_0,
}  # fmt: skip
TIMEOUT_MIN = 240  # a run that takes longer is requeued, and continues


@dataclass(frozen=True)
class Cluster:
    """Where jobs are executed, and what each of them gets.

    Args:
        name: One of ``CLUSTERS``.
        options: Parameters, as ``find_cluster`` takes them.
    """

    name: str
    options: Mapping[str, Any]

    @property
    def threads(self) -> int | None:
        """CPU threads of a process; None if torch chooses."""
        return self.options.get("cpus_per_task")

    @property
    def most_jobs(self) -> int | None:
        """Jobs at a time; None if the cluster decides."""
        if self.name == "slurm":
            return None
        if self.options.get("gpus_per_node"):
            return 1  # every local job gets the first GPUs
        return max(1, len(slots("cpu")) // (self.threads or 1))

    def parameters(self) -> dict[str, Any]:
        """Return what submitit's ``AutoExecutor`` takes: a process for each GPU, requeuing."""
        found: dict[str, Any] = {"timeout_min": TIMEOUT_MIN, "stderr_to_stdout": True}
        found["tasks_per_node"] = max(1, self.options.get("gpus_per_node", 0))
        for key, value in self.options.items():
            found[key if key in SHARED else f"slurm_{key}"] = value
        if self.name == "slurm":
            # srun does not take the number of CPUs from sbatch.
            cpus = [] if self.threads is None else [f"--cpus-per-task={self.threads}"]
            found["slurm_srun_args"] = ["--kill-on-bad-exit=1", *cpus]
            found["slurm_additional_parameters"] = {"requeue": True}
        return found


def find_cluster(name: str, options: str = "") -> Cluster:
    """Return the cluster that a command names.

    Args:
        name: "slurm", or "local" for processes of this machine.
        options: Parameters of every job, such as "partition=gpu,timeout_min=600,gpus_per_node=1".

    Raises:
        UserError: There is no such cluster or parameter, or submitit or Slurm is not installed.
    """
    if name not in CLUSTERS:
        raise UserError(
            f"cluster: expected one of {', '.join(CLUSTERS)}; got {shown(name)}"
            f"{suggest(name, CLUSTERS)}"
        )
    known = SHARED | (OF_SLURM if name == "slurm" else {})
    # A value may have commas.
    found = dict(_option(text, known) for text in re.split(r",(?=\w+=)", options) if options)
    try:
        import submitit  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(
            "cluster: submitit is not installed: pip install 'comrope[cluster]'"
        ) from None
    if name == "slurm" and shutil.which("sbatch") is None:
        raise UserError("cluster: expected a machine that submits jobs to Slurm; found no sbatch")
    return Cluster(name, found)


def _option(text: str, known: Mapping[str, tuple[type, Bounds]]) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or key not in known:
        raise UserError(
            f"cluster-options: expected NAME=VALUE with a name of {', '.join(known)}; got "
            f"{shown(text)}{suggest(key, known)}"
        )
    return key, checked(*known[key], Text(value), f"cluster-options: {key}")
