"""The training loop: steps, gradients, averages, evaluation between epochs.

It has no access to paths, signals or locks. A ``Sink`` stores checkpoints and records, and requests
the stop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from comrope.experiments.common.console import peak_memory, progress_bar, say
from comrope.experiments.common.distributed import (
    accumulating,
    autocast,
    distribute,
    gather_state,
    gather_tensor,
    sum_over_processes,
    unwrap,
)
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.common.randomness import seed_everything
from comrope.experiments.data.workers import end, start
from comrope.experiments.tasks.base import Step, Task
from comrope.experiments.tasks.init_from import InitReport, check_fit, load_weights
from comrope.experiments.training.evaluate import evaluate_view
from comrope.experiments.training.metrics import Meter
from comrope.experiments.training.optim import create_optimizer, create_schedule, try_optimizer
from comrope.experiments.training.state import (
    Average,
    Snapshot,
    TrainingState,
    load_optimizer,
    load_scaler,
    optimizer_numbers,
    optimizer_tensors,
)

__all__ = ["Outcome", "Sink", "Trainer"]

ASK_EVERY = 4  # steps between exchanges over all processes about stopping


class Sink(Protocol):
    """Storage of a trainer's checkpoints and records. Every process has one."""

    def should_stop(self, step: int) -> bool:
        """Return whether this process should stop, now or after this step."""

    def checkpoint(self, state: Snapshot) -> None:
        """Store a training state; only the main process has tensors in it."""

    def log(self, event: str, **values: Any) -> None:
        """Store a record; called in the main process only."""


class Outcome(NamedTuple):
    """The outcome of a training."""

    by_view: dict[str, dict[str, Any]]  # evaluations by the name of their view
    weights: dict[str, Tensor]  # evaluated weights on the CPU; empty except in the main process
    unreadable: int  # skipped training samples, over all processes


class Trainer:
    """Train a task.

    Args:
        task: The task.
        accelerator: Of this process.
        sink: Storage of checkpoints and records.
        label: Name of the run in progress bars.
        progress: Show progress bars.

    Call ``initialize`` or ``restore``, then ``fit`` and ``finish``, and ``close`` in any case.
    """

    def __init__(
        self,
        task: Task,
        accelerator: Accelerator,
        sink: Sink,
        *,
        label: str = "run",
        progress: bool = False,
    ) -> None:
        self.task, self.config = task, task.config
        self.accelerator, self.sink, self.label = accelerator, sink, label
        self.is_main = accelerator.is_main_process
        self.progress = progress and self.is_main
        train = self.config.train
        views = task.views().values()
        try_optimizer(self.config, accelerator.device)
        model = task.build_model()
        for view in (task.training_view, *views):
            task.check_view(model, view)
        task.try_transforms(views)
        self.source, self.validation_source = task.open()
        share = {"process": accelerator.process_index, "processes": accelerator.num_processes}
        self.batches = task.training_batches(len(self.source), **share)
        self.validation = task.validation(self.validation_source, **share)
        self.stream: Iterator[Any] | None = None
        if train.compile:
            torch.compiler.reset()  # drop the compilations of earlier runs
            task.compile(model)
        self.model = distribute(model, train.strategy, accelerator, task.blocks(model))
        self.bare = unwrap(self.model)
        task.prepare(self.bare, accelerator)
        self.optimizer = create_optimizer(self.config.optim, self.bare, task.layer_of)
        self.schedule = create_schedule(self.config, self.optimizer, self.batches.steps_per_epoch)
        scaled = train.precision == "fp16"
        self.scaler = torch.amp.GradScaler(accelerator.device.type, enabled=scaled)
        self.average = Average(self.bare, train.ema) if train.ema else None
        self.step = 0
        self.unreadable = 0  # training samples that this process skipped

    def initialize(self) -> InitReport | None:
        """Begin at step 0, with the weights of ``train.start_from`` if it is set."""
        if self.config.train.start_from is None:
            return None
        report = self.task.initialize(self.bare)
        if self.average is not None:
            self.average = Average(self.bare, self.average.decay)
        return report

    def restore(self, state: TrainingState) -> None:
        """Continue from a training state."""
        for part in ("model", "average") if self.average is not None else ("model",):
            if not _has_finite_norms(state.tensors(part)):
                raise UserError(
                    f"{state.label}: {part} has weights that are not finite; remove it to continue "
                    "from the previous one"
                )
        load_weights(self.bare, state.tensors("model"), state.label)
        tensors, numbers = state.tensors("optimizer"), state.values["optimizer"]
        try:
            load_optimizer(self.bare, self.optimizer, tensors, numbers)
            load_scaler(self.scaler, state.values["scaler"])
        except ValueError as error:
            raise UserError(
                f"{state.label}: {error}; remove it to continue from the previous one"
            ) from None
        if self.average is not None:
            average = state.tensors("average")
            check_fit(f"{state.label}: average", dict(self.bare.named_parameters()), average)
            self.average.load(self.bare, average)
        self.step = state.step
        self.unreadable = state.values["unreadable"] if self.is_main else 0

    def snapshot(self) -> Snapshot:
        """Return the training state after this step. Every process must call it.

        Raises:
            UserError: The weights are not finite.
        """
        norms = torch.stack([gather_tensor(p.norm()) for p in self.bare.parameters()])
        if not norms.isfinite().all():
            raise UserError(
                f"the weights are not finite after step {self.step}; existing checkpoints are "
                "earlier. Try a smaller optim.lr or optim.clip_grad"
            )
        parts = {
            "model": self.bare.state_dict(),
            "optimizer": optimizer_tensors(self.bare, self.optimizer),
        }
        if self.average is not None:
            parts["average"] = self.average.tensors
        values = {
            "unreadable": self._sum(self.unreadable),
            "scaler": self.scaler.state_dict(),
            "optimizer": optimizer_numbers(self.optimizer),
        }
        gathered = {n: gather_state(some, keep=self.is_main) for n, some in parts.items()}
        return Snapshot(self.step, values, gathered)

    def fit(self) -> None:
        """Train to the last step.

        Raises:
            Interrupted: The sink requested a stop; the state is in a checkpoint.
        """
        train, meter = self.config.train, Meter()
        self.batches.start = self.step
        loader = self.task.training_loader(self.source, self.batches)
        self.stream = stream = start(loader)
        with progress_bar(self.progress, "steps") as bar:
            row = bar.add_task(self.label, total=self.batches.steps, completed=self.step, note="")
            self.model.train()
            while self.step < self.batches.steps:
                meter.add(self.one_step(stream, meter))
                self.step += 1
                last = self.step == self.batches.steps
                if self.step % train.log_every == 0 or last:
                    bar.update(row, note=self._report(meter))
                bar.update(row, completed=self.step)
                if self._should_stop():
                    self._save()
                    raise Interrupted(
                        f"stopped at step {self.step}, saved; the same command continues"
                    )
                if self.step % train.checkpoint_every == 0 or last:
                    meter.require_finite(self.step)
                    with meter.paused():
                        self._save()
                with meter.paused():
                    self._evaluate_between_epochs()

    def one_step(self, stream: Iterator[Any], meter: Meter) -> Tensor:
        """Update the weights once and return the loss, on the device."""
        config, device, parts = self.config, self.accelerator.device, self.batches.parts
        process = self.accelerator.process_index
        self.schedule.step_update(self.step)
        loss = torch.zeros((), device=device)
        for part in range(parts):
            batch = self._next(stream, meter)
            seed_everything(config.train.seed, "step", self.step, part, process)
            with accumulating(self.model, part == parts - 1):
                with autocast(config.train.precision, device):
                    place = Step(self.step, part, process, device)
                    part_loss = self.task.loss(self.model, batch, place) / parts
                self.scaler.scale(part_loss).backward()
            loss += part_loss.detach()
        if config.optim.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.bare.parameters(), config.optim.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.bare, self.step)
        return loss

    def evaluate(self, views: Mapping[str, Any], *, progress: bool = False) -> dict[str, Any]:
        """Return the evaluations in some views, by name; with averaged weights if there are any."""
        found = {}
        with self._evaluated_weights(), progress_bar(progress, self.task.samples) as bar:
            for name, view in views.items():
                begun = time.perf_counter()
                entry = evaluate_view(
                    self.task,
                    self.bare,
                    self.validation,
                    view,
                    self.accelerator,
                    bar=bar,
                    label=f"{self.label}: {self.task.format_view(name)}",
                    check=self._check_in_evaluation,
                )
                found[name] = {**entry, "seconds": time.perf_counter() - begun}
        return found

    def finish(self) -> Outcome:
        """Evaluate in all views; return the evaluations and the weights."""
        by_view = self.evaluate(self.task.views(), progress=self.progress)
        with self._evaluated_weights():
            weights = gather_state(self.bare.state_dict(), keep=self.is_main)
        return Outcome(by_view, weights, self._sum(self.unreadable))

    def close(self) -> None:
        """End the loading processes."""
        end(self.stream)
        self.validation.close()

    def _next(self, stream: Iterator[Any], meter: Meter) -> Any:
        """Return the next batch; report and count unreadable samples."""
        with meter.waiting():
            batch = next(stream)
        if batch.fatal:
            raise UserError(batch.fatal)
        for name in batch.unreadable:
            self.unreadable += 1
            say(f"skipped, cannot be read: {name}")
        return batch

    def _report(self, meter: Meter) -> str:
        """Log a record of the last steps; return its text for the progress bar."""
        meter.require_finite(self.step)
        loss, steps_per_second, waiting = meter.report()
        total, unreadable = sum_over_processes(self.accelerator, loss, float(self.unreadable))
        mean = total / self.accelerator.num_processes
        speed, samples = steps_per_second * self.config.train.batch_size, self.task.samples
        if self.is_main:
            values = {
                "step": self.step,
                "epoch": self.step / self.batches.steps_per_epoch,
                "loss": mean,
                "lr": max(group["lr"] for group in self.optimizer.param_groups),
                f"{samples}_per_second": speed,
                "waiting_for_data": waiting,
                "peak_memory_gib": peak_memory(self.accelerator.device),
                "unreadable": int(unreadable),
            }
            self.sink.log("train", **values)
        return f"loss {mean:.3f}, {speed:,.0f} {samples}/s"

    def _should_stop(self) -> bool:
        asked = self.sink.should_stop(self.step)
        if self.accelerator.num_processes == 1:
            return asked
        return self.step % ASK_EVERY == 0 and self._sum(asked) > 0

    def _save(self) -> None:
        self.sink.checkpoint(self.snapshot())
        self.accelerator.wait_for_everyone()

    def _evaluate_between_epochs(self) -> None:
        """Evaluate in the training view every few epochs, but not the last, as ``finish`` does."""
        epoch, within = divmod(self.step, self.batches.steps_per_epoch)
        every = self.config.evaluate.every
        if within or not every or epoch % every or self.step == self.batches.steps:
            return
        try:
            (found,) = self.evaluate({"": self.task.training_view}).values()
        except Interrupted:
            self._save()
            raise
        if self.is_main:
            values, took = self.task.log_values(found), found["seconds"]
            self.sink.log("evaluation", step=self.step, epoch=epoch, **values, seconds=took)

    def _check_in_evaluation(self) -> None:
        """Raise if this process should stop and is the only one.

        Several processes finish the evaluation, because they would stop at different samples.
        """
        if self.accelerator.num_processes == 1 and self.sink.should_stop(self.step):
            raise Interrupted("stopped in evaluation; the same command continues")

    def _evaluated_weights(self) -> contextlib.AbstractContextManager[None]:
        return self.average.applied(self.bare) if self.average else contextlib.nullcontext()

    def _sum(self, value: float) -> int:
        return int(sum_over_processes(self.accelerator, float(value))[0])


def _has_finite_norms(tensors: Mapping[str, Tensor]) -> bool:
    return all(t.norm().isfinite() for t in tensors.values() if t.is_floating_point())
