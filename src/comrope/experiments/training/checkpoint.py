"""Checkpoints: one folder per step, with weights and optimizer as safetensors, the rest as JSON.

A folder with its checksums is written under another name and then renamed, so every checkpoint is
complete. A checkpoint is read only if all files have their checksums; otherwise the previous one is
used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from comrope import _json
from comrope._checks import one_line
from comrope._files import commit_directory, remove, sha256_of
from comrope._json import COUNT, SHA256, Entries
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import save_tensors
from comrope.experiments.training.state import VALUES

__all__ = ["Checkpoint", "latest", "save"]

STATE = "state.json"  # one line of JSON, and its checksum on the next
FILE = "{}.safetensors"  # of a part of the tensors
SUMS = Entries(
    {FILE.format(name): SHA256 for name in ("model", "optimizer")},
    {FILE.format("average"): SHA256},
    others=None,
)
SCHEMA = Entries({**VALUES.required, "step": COUNT, "sums": SUMS})
NAME = re.compile("step-([0-9]+)")


class Checkpoint(NamedTuple):
    """A complete checkpoint on disk; see ``state.TrainingState``."""

    path: Path
    step: int
    values: dict[str, Any]

    @property
    def label(self) -> str:
        return str(self.path)

    def tensors(self, name: str) -> dict[str, Tensor]:
        file = FILE.format(name)
        return load_file(self.path / file) if file in self.values["sums"] else {}


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
            save_tensors(part, temporary / FILE.format(name))
        sums = {file.name: sha256_of(file) for file in sorted(temporary.iterdir())}
        content = json.dumps({**values, "step": step, "sums": sums})
        digest = hashlib.sha256(content.encode()).hexdigest()
        (temporary / STATE).write_text(f"{content}\n{digest}\n", encoding="utf-8")
        commit_directory(temporary, target)  # target exists after a resume from an earlier step
    except (OSError, SafetensorError) as error:  # a full disk raises either
        shutil.rmtree(temporary, ignore_errors=True)
        rest = "earlier ones are unchanged" if _steps(folder) else "there is no earlier one"
        raise UserError(f"checkpoint {target} cannot be written ({error}); {rest}") from None
    found = _steps(folder)
    for other, path in found.items():
        # Later checkpoints are from before a resume at an earlier step.
        if other > step or other in sorted(s for s in found if s <= step)[:-keep]:
            with contextlib.suppress(FileNotFoundError):  # someone else removed it
                remove(path)
    return target


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None; report damaged ones.

    Raises:
        UserError: All checkpoints are damaged.
    """
    for path in sorted(folder.glob("step-*")):
        if not NAME.fullmatch(path.name):
            _report(f"checkpoint {one_line(path)} is ignored: expected a name of step- and digits")
    refused = []
    for checkpoint in _newest_first(folder):
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        refused.append(checkpoint)
    if refused:
        raise UserError(
            f"no checkpoint in {folder} is complete: {'; '.join(refused)}; remove the folder to "
            "train from the beginning"
        )
    return None


def _newest_first(folder: Path) -> Iterator[Checkpoint | str]:
    """Yield complete checkpoints, and for damaged ones the reason."""
    for step, path in sorted(_steps(folder).items(), reverse=True):
        try:
            yield _read(path, step)
        except (OSError, ValueError, SafetensorError, MemoryError) as error:
            reason = f"checkpoint {path} is damaged: {one_line(error)}"
            _report(f"{reason}; trying the previous one")
            yield reason


def _read(path: Path, step: int) -> Checkpoint:
    """Return a checkpoint; raise unless it is complete."""
    content, *rest = _json.read_bytes(path / STATE).splitlines()
    if rest != [hashlib.sha256(content).hexdigest().encode()]:
        raise ValueError(f"{STATE} does not have its checksum")
    try:
        values = _json.parse(content, SCHEMA)
    except ValueError as error:
        raise ValueError(f"{STATE}: {error}") from None
    if values["step"] != step:
        raise ValueError(f"{STATE} is of step {values['step']}")
    for name, expected in values["sums"].items():
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        with safe_open(str(path / name), framework="pt"):
            pass  # the file has the size that its header gives, so its checksum takes finite time
        if sha256_of(path / name) != expected:
            raise ValueError(f"{name} does not have its checksum")
    return Checkpoint(path, step, values)


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _steps(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, complete or not."""
    named = {path: NAME.fullmatch(path.name) for path in folder.glob("step-*")}
    return {int(match[1]): path for path, match in named.items() if match}
