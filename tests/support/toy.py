"""A task outside of the package: a small network learns a curve. Steps take a millisecond."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from comrope.experiments.common.distributed import sum_over_processes
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, load_recipe
from comrope.experiments.data.batches import Batch, Key
from comrope.experiments.tasks.base import NO_PROBE, SingleView, Splits, Step, Task

TRAIN, VALIDATION = 64, 20


class Points(Dataset[Any]):
    """Points of a curve by key; a ``bad`` one cannot be read."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.x, self.bad = torch.linspace(-2, 2, count).unsqueeze(1), bad

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, str | None]:
        x = self.x[key.sample]
        name = f"point {key.sample}" if key.sample == self.bad else None
        return x, x.sin() if key.place >= 0 else torch.full_like(x, torch.nan), name


class Curve(Task):
    """The error is in thousandths. The option ``bad`` is the number of an unreadable point."""

    name, headline, unit, samples = "curve", "error", "‰", "points"

    def open(self, *, train: bool = True) -> Splits:
        bad = self.config.options.get("bad")
        return Splits(Points(TRAIN, bad) if train else None, Points(VALIDATION))

    def dataset(self, source: Points, view: SingleView | None) -> Points:
        return source

    def collate(self, items: list[Any]) -> Batch:
        x, y, names = zip(*items, strict=True)
        bad = [name for name in names if name]
        stops = bad and self.config.data.unreadable != "skip"
        fatal = f"{bad[0]}: cannot be read" if stops else None
        return Batch(torch.stack(x), torch.stack(y), bad, fatal)

    def create_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Tensor:
        return nn.functional.mse_loss(model(batch.inputs), batch.targets)

    @torch.inference_mode()
    def evaluate(
        self, model, validation, view, accelerator, *, probe=NO_PROBE, advance=lambda samples: None
    ) -> dict[str, Any]:
        was_training, total, count = model.training, 0.0, 0
        model.eval()
        for batch in validation.batches(view):
            known = ~batch.targets.isnan()
            total += float((model(batch.inputs) - batch.targets)[known].square().sum())
            count += int(known.sum())
            advance(len(batch.inputs))
        model.train(was_training)
        total, count = sum_over_processes(accelerator, total, float(count))
        if not count:
            raise UserError("data.root: no point can be read")
        return {"error": 1e3 * total / count, "points": int(count), "unreadable": 0}


def curve(**overrides: Any) -> Config:
    """A run of two epochs of 8 steps each."""
    fields = {
        "task": "support.toy:Curve",
        "train__epochs": 2,
        "train__batch_size": 8,
        "train__log_every": 1,
        "train__checkpoint_every": 100,
        "optim__lr": 5e-2,
        "evaluate__batch_size": 8,
    }
    named = {name.replace("__", "."): value for name, value in {**fields, **overrides}.items()}
    return load_recipe("digits").with_overrides(named)
