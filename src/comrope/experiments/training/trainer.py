"""A configuration at work: steps, checkpoints, evaluations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from comrope.experiments.common.console import progress_bar, say
from comrope.experiments.common.distributed import (
    accumulating,
    autocast,
    distribute,
    full,
    same_for_all,
    total,
    unwrap,
)
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.common.files import write_tensors
from comrope.experiments.common.randomness import seed_everything
from comrope.experiments.config import Config
from comrope.experiments.data.batches import Batch, TrainBatches, Validation, train_loader
from comrope.experiments.data.images import open_sources
from comrope.experiments.data.workers import end, start
from comrope.experiments.runs.directory import WEIGHTS, write_config, write_result
from comrope.experiments.runs.log import Log
from comrope.experiments.tasks.base import objective_of
from comrope.experiments.tasks.init_from import APE
from comrope.experiments.tasks.views import View, check_views, said, usual_view, views_of
from comrope.experiments.training import checkpoint
from comrope.experiments.training.cuda_graph import replay_in_training
from comrope.experiments.training.evaluate import build_model, compile_blocks, vit_of
from comrope.experiments.training.metrics import Meter, summarize
from comrope.experiments.training.optim import create_optimizer, create_schedule
from comrope.experiments.training.state import (
    Average,
    load_model,
    load_optimizer,
    optimizer_numbers,
    optimizer_tensors,
    whole,
)
from comrope.models import ViT

__all__ = ["Run"]


class Run:
    """A configuration at work. Nothing is written before everything it needs was found."""

    def __init__(self, config: Config, out: Path, accelerator: Accelerator, progress: bool) -> None:
        self.config, self.out, self.accelerator = config, out, accelerator
        self.is_main = self.accelerator.is_main_process
        self.progress = progress and self.is_main
        model = build_model(config)
        check_views(model, (usual_view(config), *views_of(config).values()))
        train_source, self.val_source = open_sources(config)
        assert train_source is not None
        self.train_source = train_source
        share = {"rank": accelerator.process_index, "world": accelerator.num_processes}
        self.batches = TrainBatches(config, len(train_source), **share)
        self.validation = Validation(config, self.val_source, **share)
        self.stream: Iterator[Batch] | None = None
        if config.train.compile:
            torch.compiler.reset()  # what an earlier run compiled is not needed any more
            compile_blocks(vit_of(model))
        self.model = distribute(model, config.train.strategy, self.accelerator)
        self.bare: ViT = unwrap(self.model)  # type: ignore[assignment]
        if config.detects and config.detect.graph:
            self._record_backbone()  # here, where nothing loads yet
        self.optimizer = create_optimizer(config, self.bare)
        self.schedule = create_schedule(config, self.optimizer, self.batches.steps_per_epoch)
        scaled = config.train.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.accelerator.device.type, enabled=scaled)
        self.average = Average(self.bare, config.train.ema) if config.train.ema else None
        self.objective = objective_of(config, self.accelerator)
        self.step = 0
        self.unreadable = 0
        self.stop: int | None = None  # the signal that asked for it

    def _record_backbone(self) -> None:
        """As a CUDA graph, where one GPU trains and gradients are not added up over parts."""
        config, device = self.config, self.accelerator.device
        alone = self.accelerator.num_processes == 1 and config.train.accumulate == 1
        if device.type != "cuda" or not alone:
            return
        size = 2 * (config.detect.image_size,)
        images = torch.zeros(config.train.batch_size, config.data.in_chans, *size, device=device)
        with autocast(config.train.precision, device):
            replay_in_training(cast(Any, self.bare).backbone.plain, images)

    def restore(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        found = checkpoint.latest(self.out / "checkpoints")
        step = found.step if found is not None else 0
        if step != same_for_all(self.accelerator, step):
            raise UserError(
                f"out: not every process sees the checkpoints in {self.out}; it must be on storage "
                "that all share"
            )
        if found is not None:
            load_model(self.bare, found.tensors("model"), str(found.path))
            load_optimizer(
                self.bare, self.optimizer, found.tensors("optimizer"), found.state["optimizer"]
            )
            if self.average is not None:
                self.average.load(self.bare, found.tensors("average"))
            self.scaler.load_state_dict(found.state["scaler"])
            self.step = found.step
            self.unreadable = found.state["unreadable"] if self.is_main else 0
            if self.is_main:
                say(f"{self.out}: resumed at step {self.step}")
        started = self.begin() if found is None else {}
        self.accelerator.wait_for_everyone()
        if self.progress:
            accelerator, precision = self.accelerator, self.config.train.precision
            say(f"{accelerator.num_processes} process(es), {accelerator.device}, "
                f"precision {precision}; {len(self.train_source)} images to train on")  # fmt: skip
            if left_out := getattr(self.train_source, "left_out", 0):
                say(f"{left_out} boxes are left out: crowds, or outside of their images")
        if self.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
            write_config(self.out, self.config)
            self.log = Log(self.out, resume_from=self.step)
            if started:
                self.log.write("started", step=0, **started)
        self.batches.start = self.step
        self.loader = train_loader(self.config, self.train_source, self.batches)

    def begin(self) -> dict[str, Any]:
        """With the weights of another run, if one was named; what is known of it."""
        if self.config.train.start_from is None:
            return {}
        started = self.objective.begin(self.bare)
        if self.average is not None:
            self.average = Average(self.bare, self.average.decay)
        if self.is_main and any(map(APE.search, started["left_out"])):
            say(f"{self.out}: the absolute positions of {started['start']} are left out; "
                "model.ape=true keeps them")  # fmt: skip
        return started

    def save(self) -> None:
        """A checkpoint of what is still a model: weights that are not finite are not kept."""
        self.require_finite_weights()
        parts = {
            "model": self.bare.state_dict(),
            "optimizer": optimizer_tensors(self.bare, self.optimizer),
            "average": self.average.tensors if self.average is not None else {},
        }
        tensors = {name: whole(some, keep=self.is_main) for name, some in parts.items() if some}
        state = {
            "unreadable": int(total(self.accelerator, float(self.unreadable))[0]),
            "scaler": self.scaler.state_dict(),
            "optimizer": optimizer_numbers(self.optimizer),
        }
        if self.is_main:
            folder = self.out / "checkpoints"
            checkpoint.save(folder, self.step, tensors, state, keep=self.config.train.keep)
        self.accelerator.wait_for_everyone()

    def require_finite_weights(self) -> None:
        norms = torch.stack([full(p.norm()) for p in self.bare.parameters()])
        if not norms.isfinite().all():
            raise UserError(
                f"the weights are not finite after step {self.step}; the checkpoints in {self.out} "
                "are from before. A smaller optim.lr or optim.clip_grad may help"
            )

    def fit(self) -> None:
        """All steps that are left."""
        train = self.config.train
        meter = Meter(self)
        self.stream = stream = start(self.loader)
        with progress_bar(self.progress, "steps") as bar:
            task = bar.add_task(
                self.out.name, total=self.batches.steps, completed=self.step, note=""
            )
            self.model.train()
            while self.step < self.batches.steps:
                loss = self.one_step(stream, meter)
                meter.add(loss)
                self.step += 1
                last = self.step == self.batches.steps
                if self.step % train.log_every == 0 or last:
                    note = meter.report()
                    bar.update(task, note=note)
                bar.update(task, completed=self.step)
                if self.should_stop():
                    self.save()
                    raise Interrupted(f"{self.out}: stopped at step {self.step}, saved; "
                                      "the same command goes on")  # fmt: skip
                if self.step % train.checkpoint_every == 0 or last:
                    meter.require_finite()
                    with meter.paused():
                        self.save()
                with meter.paused():
                    self.maybe_evaluate()

    def close(self) -> None:
        """End the processes that load."""
        end(self.stream)
        self.validation.close()

    def one_step(self, stream: Iterator[Batch], meter: Meter) -> Tensor:
        """One update of the weights; its loss, on the device."""
        config, parts = self.config, self.config.train.accumulate
        self.schedule.step_update(self.step)
        loss = torch.zeros((), device=self.accelerator.device)
        for part in range(parts):
            batch = meter.wait(stream)
            seed_everything(
                config.train.seed, "step", self.step, part, self.accelerator.process_index
            )
            with accumulating(self.model, part == parts - 1):
                with autocast(config.train.precision, self.accelerator.device):
                    part_loss = self.objective.loss(self, batch, part) / parts
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

    def should_stop(self) -> bool:
        if self.accelerator.num_processes == 1:
            return self.stop is not None
        if self.step % 4:  # asking costs a round trip
            return False
        return total(self.accelerator, float(self.stop is not None))[0] > 0

    def maybe_evaluate(self) -> None:
        """At the training resolution, every few epochs; the end of training evaluates them all."""
        epoch, within = divmod(self.step, self.batches.steps_per_epoch)
        every = self.config.evaluate.every
        if within or not every or epoch % every or self.step == self.batches.steps:
            return
        try:
            found = self.evaluate({"": usual_view(self.config)}, False)
        except Interrupted:
            self.save()
            raise
        if self.is_main:
            told, took = self.objective.logged(found[""]), found[""]["seconds"]
            self.log.write("evaluation", step=self.step, epoch=epoch, **told, seconds=took)

    def evaluate(self, views: dict[str, View], progress: bool) -> dict[str, Any]:
        average = self.average.applied(self.bare) if self.average else contextlib.nullcontext()
        results = {}
        with average, progress_bar(progress, "images") as bar:
            for name, view in views.items():
                images = len(self.val_source)
                task = bar.add_task(f"{self.out.name}: {said(name)}", total=images, note="")
                begun = time.perf_counter()
                advance = partial(self._advance, bar, task)
                results[name] = found = self.objective.evaluate(
                    self.bare, self.validation, view, advance
                )
                found["seconds"] = time.perf_counter() - begun
                note = f"{found[self.config.headline]:.2f} %"
                bar.update(task, completed=images, note=note)
        return results

    def _advance(self, bar: Any, task: Any, images: int) -> None:
        # Several processes would not leave at the same image; they go on to the end of it.
        if self.stop is not None and self.accelerator.num_processes == 1:
            raise Interrupted(f"{self.out}: stopped in evaluation; the same command goes on")
        bar.advance(task, images)

    def finish(self) -> dict[str, Any]:
        """Evaluate, and write the weights and the result."""
        results = self.evaluate(views_of(self.config), self.progress)
        with self.average.applied(self.bare) if self.average else contextlib.nullcontext():
            weights = whole(self.bare.state_dict(), keep=self.is_main)
        result: dict[str, Any] = {}
        if self.is_main:
            write_tensors(self.out / WEIGHTS, weights)
            result = summarize(self, results)
            self.log.write("result", step=self.step, **result)
            self.log.close()
            write_result(self.out, result)
        self.accelerator.wait_for_everyone()
        return result
