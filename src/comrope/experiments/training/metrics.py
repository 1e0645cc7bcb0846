"""Loss, speed, time spent waiting for data, memory: of a run, since its last report."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from comrope.experiments.common.console import machine, peak_memory, say
from comrope.experiments.common.distributed import total
from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import Batch
from comrope.experiments.runs.directory import LOG
from comrope.experiments.runs.log import read_log
from comrope.experiments.training.evaluate import vit_of

__all__ = ["Meter", "summarize"]


class Meter:
    def __init__(self, run: Any) -> None:
        self.run = run
        self._restart()

    def wait(self, stream: Iterator[Batch]) -> Batch:
        """The next batch; what could not be read is named and counted."""
        begun = time.perf_counter()
        batch = next(stream)
        self.waited += time.perf_counter() - begun
        if batch.fatal:
            raise UserError(batch.fatal)
        for name in batch.unreadable:
            self.run.unreadable += 1
            say(f"skipped, cannot be read: {name}")
        return batch

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile is not training."""
        begun = time.perf_counter()
        yield
        self.started += time.perf_counter() - begun

    def require_finite(self) -> None:
        if self.losses and not torch.stack(self.losses).isfinite().all():
            raise UserError(
                f"the loss is not finite before step {self.run.step}; the checkpoints in "
                f"{self.run.out} are from before. A smaller optim.lr or optim.clip_grad may help"
            )

    def report(self) -> str:
        """Write a record, and return a note for the progress bar."""
        run = self.run
        self.require_finite()
        world = run.accelerator.num_processes
        loss, unreadable = total(
            run.accelerator, torch.stack(self.losses).mean(), float(run.unreadable)
        )
        loss /= world
        seconds = time.perf_counter() - self.started
        speed = len(self.losses) * run.config.train.batch_size / seconds
        if run.is_main:
            run.log.write(
                "train",
                step=run.step,
                epoch=run.step / run.batches.steps_per_epoch,
                loss=loss,
                lr=max(group["lr"] for group in run.optimizer.param_groups),
                images_per_second=speed,
                waiting_for_data=self.waited / seconds,
                peak_memory_gib=peak_memory(run.accelerator.device),
                unreadable=int(unreadable),
            )
        self._restart()
        return f"loss {loss:.3f}, {speed:,.0f} images/s"

    def _restart(self) -> None:
        self.losses: list[Tensor] = []
        self.waited, self.started = 0.0, time.perf_counter()


def summarize(run: Any, results: dict[str, Any]) -> dict[str, Any]:
    """What is worth knowing of a run that is over."""
    records = [r for r in read_log(run.out / LOG) if r["event"] == "train"]
    unreadable = records[-1]["unreadable"] if records else 0
    settled = records[len(records) // 4 :] or records  # past compilation and warm caches
    return {
        **run.objective.summary(run.val_source, results),
        "images": max(found["images"] for found in results.values()),
        "evaluation_seconds": sum(found["seconds"] for found in results.values()),
        "view_seconds": {name: found["seconds"] for name, found in results.items()},
        "position_parameters": vit_of(run.bare).position_parameters(),
        "parameters": sum(p.numel() for p in run.bare.parameters()),
        "steps": run.step,
        "processes": run.accelerator.num_processes,
        "images_per_second": statistics.median(r["images_per_second"] for r in settled),
        "waiting_for_data": statistics.mean(r["waiting_for_data"] for r in settled),
        "peak_memory_gib": peak_memory(run.accelerator.device),
        "data_root": run.config.data.root,
        "unreadable": {
            "training": unreadable,
            "validation": max(found["unreadable"] for found in results.values()),
        },
        "machine": machine(run.accelerator.device),
    }
