"""What the tests of runs share: a run of seconds, in this process or in one that can be killed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import Interrupted
from comrope.experiments.config import Config, load_recipe, method_fields
from comrope.experiments.data import workers
from comrope.experiments.tasks import task_of
from comrope.experiments.training.state import Snapshot
from comrope.experiments.training.train import RunFolder, train
from comrope.experiments.training.trainer import Trainer

# There is one server a process: for what the tests start as well.
workers.PRELOAD = (*workers.PRELOAD, "comrope.experiments.training.train", "support.runs")
TINY = {
    "model.name": "vit_nano_patch4_12",
    "train.epochs": 2,
    "train.batch_size": 120,  # 11 steps an epoch
    "train.perturbation_per": "sample",
    "train.log_every": 1,
    "train.checkpoint_every": 4,
    "evaluate.resolutions": (12,),
}


def tiny(**overrides) -> Config:
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_recipe("digits").with_overrides({**TINY, **named})


def finetuned(start: Path | str, method: str = "comrope-ld", **options) -> Config:
    """A method on top of the absolute positions of ``start``, from zero where it can."""
    fields = {n.replace(".", "__"): v for n, v in method_fields(method, 0.0, True).items()}
    options = {"train__epochs": 1, **fields, **options}
    return tiny(train__start_from=str(start), **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _child(config: Config, folder: Path) -> None:
    torch.set_num_threads(1)
    train(config, folder, progress=False)


def in_process(config: Config, folder: Path) -> multiprocessing.Process:
    """A real process, forked from a server that has imported everything: it starts at once."""
    workers.start_server()
    process = multiprocessing.get_context("forkserver").Process(
        target=_child, args=(config, folder)
    )
    process.start()
    return process


class Memory:
    """The sink of a trainer, in memory; asks to stop after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.records: list[dict[str, Any]] = []
        self.states: list[Snapshot] = []

    def should_stop(self, step: int) -> bool:
        return step == self.stop_after

    def checkpoint(self, state: Snapshot) -> None:
        self.states.append(state)

    def log(self, event: str, **values: Any) -> None:
        self.records.append({"event": event, **values})

    def values(self, event: str, name: str) -> list[Any]:
        """A value of all records of an event."""
        return [record[name] for record in self.records if record["event"] == event]


def trainer_of(config: Config, sink: Memory | None = None) -> Trainer:
    return Trainer(task_of(config), create_accelerator("cpu"), sink or Memory())


def stop_after(step: int, config: Config, folder: Path) -> None:
    """Train in a folder and stop after this step, as on a signal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "should_stop", lambda folder, done: done == step)
        with pytest.raises(Interrupted):
            train(config, folder, progress=False)
