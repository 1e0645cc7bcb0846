"""Checkpoints: a folder a step, weights and optimizer as safetensors, the rest as JSON.

Written to the side, checked sums and all, and moved into place in one step: a checkpoint is there
whole or not at all. Read only if every file still has its sum; else the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from comrope._files import commit_directory, sha256_of
from comrope.experiments.common.errors import UserError

__all__ = ["Checkpoint", "latest", "save"]

STATE = "state.json"  # one line, and below it its sum


class Checkpoint(NamedTuple):
    path: Path
    step: int
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.path / f"{name}.safetensors")


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Path:
    """Write checkpoint ``step``, then remove all but the newest ``keep``."""
    folder.mkdir(parents=True, exist_ok=True)
    target, aside = folder / f"step-{step:08d}", folder / f".writing-{os.getpid()}"
    for left in folder.glob(".writing-*"):  # by a writer that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        aside.mkdir()
        for name, some in tensors.items():
            save_file(_plain(some), aside / f"{name}.safetensors")
        sums = {file.name: sha256_of(file) for file in sorted(aside.iterdir())}
        content = json.dumps({**state, "step": step, "sums": sums})
        digest = hashlib.sha256(content.encode()).hexdigest()
        (aside / STATE).write_text(f"{content}\n{digest}\n")
        commit_directory(aside, target)  # it exists after a resume from an earlier step
    except (OSError, SafetensorError) as error:  # a full disk is either
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"checkpoint {target} cannot be written ({error}); those before it are untouched"
        ) from None
    found = _steps(folder)
    for other, path in found.items():
        # Later ones are of a future that a resume has left, damaged or not.
        if other > step or other in sorted(s for s in found if s <= step)[:-keep]:
            shutil.rmtree(path)
    return target


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; those that are not are named on the way."""
    refused = []
    for checkpoint in _newest_first(folder):
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        refused.append(checkpoint)
    if refused:
        raise UserError(f"no checkpoint in {folder} is whole: {'; '.join(refused)}")
    return None


def _newest_first(folder: Path) -> Iterator[Checkpoint | str]:
    for step, path in sorted(_steps(folder).items(), reverse=True):
        try:
            content, digest = (path / STATE).read_text().splitlines()
            if hashlib.sha256(content.encode()).hexdigest() != digest:
                raise ValueError(f"{STATE} is not what was written")
            state = json.loads(content)
            for name, expected in state["sums"].items():
                if sha256_of(path / name) != expected:
                    raise ValueError(f"{name} is not what was written")
            yield Checkpoint(path, step, state)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"checkpoint {path} is damaged: {error}"
            print(f"{reason}; looking for the one before it", file=sys.stderr, flush=True)
            yield reason


def _steps(folder: Path) -> dict[int, Path]:
    return {
        int(path.name.removeprefix("step-")): path
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdigit()
    }
