"""Folders of finished runs: weights, configuration, result, log, measurements."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import CONFIG, load_recipe, to_yaml
from comrope.experiments.runs.directory import (
    LOG,
    RESULT,
    WEIGHTS,
    check_run_dir,
    write_finished,
)
from comrope.experiments.runs.log import read_log
from comrope.experiments.runs.records import record_of
from comrope.experiments.tasks import task_of
from comrope.experiments.training.evaluate import load_run
from comrope.experiments.training.train import is_finished
from comrope.experiments.training.verify import reseal_run, verify_run
from comrope.models import ViT
from fuzz import oracles
from fuzz.folders import FolderTarget
from fuzz.judge import require

__all__ = ["Fuzz"]


def seal_again(case: Path) -> None:
    """Write the digests of the present files, without any check."""
    result = json.loads(oracles.content_of(case / RESULT))
    result.pop("seal", None)
    seal = {name: oracles.digest_of(case / name) for name in (CONFIG, WEIGHTS)}
    result["seal"] = {**seal, "result": _digest(result)}
    (case / RESULT).write_text(json.dumps(result))


def unseal(case: Path) -> None:
    """Make the folder one of an earlier version, which had no digests."""
    result = json.loads(oracles.content_of(case / RESULT))
    del result["seal"]
    (case / RESULT).write_text(json.dumps(result))


class Fuzz(FolderTarget):
    errors = (UserError,)
    more: ClassVar[Any] = {"unseal": unseal, "seal": seal_again}

    def create(self, folder: Path) -> None:
        torch.manual_seed(0)
        small = {"model.name": "vit_nano_patch4_12", "evaluate.resolutions": (12,)}
        self.config = load_recipe("digits").with_overrides(small)
        weights = task_of(self.config).build_model().state_dict()
        result = {"top1": {"12": 50.0}, "steps": 2, "parameters": 9, "machine": {"comrope": "1"}}
        write_finished(folder, to_yaml(self.config), weights, result)
        log: list[dict[str, Any]] = [
            {"event": "train", "step": step, "loss": 1 / step} for step in range(1, 4)
        ]
        log.append({"event": "evaluation", "step": 3, "epoch": 1, "top1": 50.0, "time": "now"})
        (folder / LOG).write_text("".join(json.dumps(record) + "\n" for record in log))
        (folder / "offset.json").write_text(json.dumps({"about": {}, "found": {"offset": {}}}))

    def judge(self, case: Path) -> bool:
        before = self.changed(case)
        right = unchanged(case)
        with self.watched(), _without_initialization():
            loaded = self.ask(lambda: load_run(case), case)
            record = self.ask(lambda: record_of(case), case)
            verified = self.ask(lambda: verify_run(case), case)
            self.ask(lambda: is_finished(self.config, case), case)
            self.ask(lambda: check_run_dir(self.config, case), case)
            self.ask(lambda: read_log(case / LOG), case)
        require(self.changed(case) == before, "a reader changes files")
        if loaded.accepted:
            require(right >= {CONFIG, RESULT, WEIGHTS}, "silent: load_run", sorted(before))
            _check_weights(loaded.value[1], case)
        if record.accepted and record.value is not None:
            require(right >= {CONFIG, RESULT}, "silent: record_of", sorted(before))
            json.dumps(record.value.losses, allow_nan=False)
        if verified.accepted:
            least = {CONFIG, RESULT, WEIGHTS} if (case / WEIGHTS).is_file() else {CONFIG, RESULT}
            require(right >= least, "silent: verify_run", sorted(before))
        with self.watched(), _without_initialization():
            if self.ask(lambda: reseal_run(case), case).accepted:
                verify_run(case)
                _check_weights(load_run(case)[1], case)
        return loaded.accepted and record.accepted


@contextlib.contextmanager
def _without_initialization() -> Iterator[None]:
    """Build models without initial weights, which takes longer than reading the weights."""

    def skip(_: torch.nn.Module) -> None:
        pass

    with (
        mock.patch.object(torch.nn.Linear, "reset_parameters", skip),
        mock.patch.object(ViT, "reset_parameters", skip),
    ):
        yield


def unchanged(case: Path) -> set[str]:
    """Return the files that have the digests of the seal; all of them without a seal."""
    try:
        result = json.loads(oracles.content_of(case / RESULT))
        seal = result.pop("seal", None)
        if seal is None:
            return {CONFIG, RESULT, WEIGHTS}
        right = {RESULT} if seal["result"] == _digest(result) else set()
        for name in (CONFIG, WEIGHTS):
            with contextlib.suppress(OSError):
                right |= {name} if seal[name] == oracles.digest_of(case / name) else set()
        return right
    except (OSError, ValueError, AttributeError, LookupError, RecursionError, TypeError):
        return set()


def _digest(result: Any) -> str:
    return oracles.digest(json.dumps(result, sort_keys=True, separators=(",", ":")).encode())


def _check_weights(model: torch.nn.Module, case: Path) -> None:
    state = model.state_dict()
    require(oracles.equal(state, oracles.read_tensors(case / WEIGHTS)), "silent: other weights")
    require(oracles.finite(list(state.values())), "silent: weights that are not finite")
