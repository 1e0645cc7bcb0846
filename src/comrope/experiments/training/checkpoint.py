"""Checkpoints: one folder per step, with weights and optimizer as safetensors, the rest as JSON.

A folder with its checksums is written under another name and then renamed, so every checkpoint is
complete. A checkpoint is read only if all files have their checksums; otherwise the previous one is
used.
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

STATE = "state.json"  # one line of JSON, and its checksum on the next


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk; see ``state.TrainingState``."""

    path: Path
    step: int
    values: dict[str, Any]

    @property
    def label(self) -> str:
        return str(self.path)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.path / f"{name}.safetensors")


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    values: Mapping[str, Any],
    *,
    keep: int = 2,
) -> Path:
    """Write checkpoint ``step``, then remove all but the newest ``keep``.

    Args:
        folder: The folder of all checkpoints.
        step: The steps done.
        tensors: By part and name.
        values: Plain values, for JSON.
        keep: Number of checkpoints that remain.

    Returns:
        The folder of the checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, temporary = folder / f"step-{step:08d}", folder / f".writing-{os.getpid()}"
    for left in folder.glob(".writing-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, part in tensors.items():
            save_file(_plain(part), temporary / f"{name}.safetensors")
        sums = {file.name: sha256_of(file) for file in sorted(temporary.iterdir())}
        content = json.dumps({**values, "step": step, "sums": sums})
        digest = hashlib.sha256(content.encode()).hexdigest()
        (temporary / STATE).write_text(f"{content}\n{digest}\n")
        commit_directory(temporary, target)  # target exists after a resume from an earlier step
    except (OSError, SafetensorError) as error:  # a full disk raises either
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"checkpoint {target} cannot be written ({error}); earlier ones are unchanged"
        ) from None
    found = _steps(folder)
    for other, path in found.items():
        # Later checkpoints are from before a resume at an earlier step.
        if other > step or other in sorted(s for s in found if s <= step)[:-keep]:
            shutil.rmtree(path)
    return target


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None; report damaged ones.

    Raises:
        UserError: All checkpoints are damaged.
    """
    refused = []
    for checkpoint in _newest_first(folder):
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        refused.append(checkpoint)
    if refused:
        raise UserError(f"no checkpoint in {folder} is complete: {'; '.join(refused)}")
    return None


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _newest_first(folder: Path) -> Iterator[Checkpoint | str]:
    """Yield complete checkpoints, and for damaged ones the reason."""
    for step, path in sorted(_steps(folder).items(), reverse=True):
        try:
            content, digest = (path / STATE).read_text().splitlines()
            if hashlib.sha256(content.encode()).hexdigest() != digest:
                raise ValueError(f"{STATE} does not have its checksum")
            values = json.loads(content)
            for name, expected in values["sums"].items():
                if sha256_of(path / name) != expected:
                    raise ValueError(f"{name} does not have its checksum")
            yield Checkpoint(path, step, values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"checkpoint {path} is damaged: {error}"
            print(f"{reason}; trying the previous one", file=sys.stderr, flush=True)
            yield reason


def _steps(folder: Path) -> dict[int, Path]:
    return {
        int(path.name.removeprefix("step-")): path
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdigit()
    }
