"""Checkpoints: the newest complete one is used, or the reason is one line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.tasks.images import ImageTask
from comrope.experiments.training import checkpoint
from comrope.experiments.training.state import Snapshot
from comrope.experiments.training.trainer import Trainer
from fuzz import oracles
from fuzz.folders import FolderTarget
from fuzz.judge import ask, require

__all__ = ["Fuzz", "Small"]

STEPS = (5, 10)
PARTS = ("model", "optimizer", "average")


class Small(ImageTask):
    """Digits, with a model of a few numbers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.LayerNorm(2))

    def check_view(self, model: nn.Module, view: Any) -> None:
        pass


class Nothing:
    """A sink of a trainer."""

    def should_stop(self, step: int) -> bool:
        return False

    def checkpoint(self, state: Snapshot) -> None:
        pass

    def log(self, event: str, **values: Any) -> None:
        pass


def sum_again(case: Path) -> None:
    """Write the sums of the present files into every checkpoint."""
    for path in case.glob("step-*"):
        line = oracles.content_of(path / "state.json").splitlines()[0]
        values = json.loads(line)
        for name in values["sums"]:
            if (path / name).is_file():
                values["sums"][name] = oracles.digest_of(path / name)
        content = json.dumps(values)
        digest = hashlib.sha256(content.encode()).hexdigest()
        (path / "state.json").write_text(f"{content}\n{digest}\n")


class Fuzz(FolderTarget):
    errors = (UserError,)
    more: ClassVar[Any] = {"sums": sum_again}

    def create(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = load_recipe("digits").with_overrides(
            {"model.name": "vit_nano_patch4_12", "train.ema": 0.9, "data.workers": 0}
        )
        self.trainer = Trainer(Small(config), create_accelerator("cpu"), Nothing())
        self.states: dict[int, dict[str, dict[str, Tensor]]] = {}
        for step in STEPS:
            self._train()
            state = self.trainer.snapshot()
            parts = {n: {k: t.clone() for k, t in p.items()} for n, p in state.parts.items()}
            self.states[step] = parts
            checkpoint.save(folder, step, parts, state.values)

    def judge(self, case: Path) -> bool:
        changed = {name.partition("/")[0] for name in self.changed(case)}
        with self.watched():
            found = self.ask(lambda: checkpoint.latest(case), case)
            if not found.accepted or found.value is None:
                require(bool(changed), "a valid checkpoint is refused", found.message)
                return False
            restored = self.ask(lambda: self.trainer.restore(found.value), case)
        name = found.value.path.name
        forged = name in changed and _has_its_sums(case / name)
        if not restored.accepted:
            require(forged, "a checkpoint with other tensors is complete", restored.message)
            return False
        now = self.trainer.snapshot().parts
        if name in changed:
            require(forged, "silent: a changed checkpoint is used", sorted(changed))
            for part in PARTS[: 1 + 2 * ("average" in now)]:
                file = case / name / f"{part}.safetensors"
                if part != "optimizer":
                    same = oracles.equal(now[part], oracles.read_tensors(file))
                    require(same, f"silent: other tensors of {part}")
        else:
            for part in PARTS:
                require(oracles.equal(now[part], self.states[found.value.step][part]), "silent")
        with self.watched():
            ask(self._train, names=[case], errors=())
        return True

    def _train(self) -> None:
        for number, parameter in enumerate(self.trainer.bare.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 + number)
        self.trainer.optimizer.step()
        assert self.trainer.average is not None
        self.trainer.average.update(self.trainer.bare, 100)


def _has_its_sums(path: Path) -> bool:
    """Return whether a checkpoint has the sums of its files."""
    try:
        line, digest = oracles.content_of(path / "state.json").splitlines()
        sums = json.loads(line)["sums"]
        return hashlib.sha256(line).hexdigest().encode() == digest and all(
            oracles.digest_of(path / name) == value for name, value in sums.items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
