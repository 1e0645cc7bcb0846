"""What the tests of faults share: damage to files, and commands that must end in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comrope.experiments.common.errors import UserError

# Environment of commands that import what the tests share, and use one core.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ),
    "OMP_NUM_THREADS": "1",
}


class Trap:
    """Read back by pickle, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def pickled(marker: Path) -> bytes:
    return pickle.dumps(Trap(marker))


def copy_of(folder: Path, target: Path) -> Path:
    """A copy of a run without its board."""
    return shutil.copytree(folder, target, ignore=shutil.ignore_patterns("tensorboard"))


def flip_bit(path: Path, seed: int) -> None:
    """Flip bit 30 of a random float of a file of weights."""
    content = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    place = first + 4 * random.Random(seed).randrange((len(content) - first) // 4)
    content[place + 3] ^= 64
    path.write_bytes(content)


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def unseal(run: Path) -> None:
    """Make a run one of an earlier version."""
    change_json(run / "result.json", lambda result: result.pop("seal"))


def called(*arguments: object) -> tuple[int, str]:
    """Run the command ``comrope`` in this process; return its exit code and what it prints."""
    from comrope.experiments.cli import main

    printed, code = io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.setattr(sys, "argv", ["comrope", *map(str, arguments)])
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
    return code, printed.getvalue()


def refused(name: object, *arguments: object) -> str:
    """The line of a command that must refuse a file, which the line names."""
    code, text = called(*arguments)
    (line,) = [line for line in text.splitlines() if line.startswith("comrope: ")]
    assert code == 2, text
    assert str(name) in line
    return line


def raises_line(*names: object) -> Any:
    """Expect a ``UserError`` of one line that contains some names."""
    return _Line([str(name) for name in names])


class _Line(contextlib.AbstractContextManager):
    def __init__(self, names: list[str]) -> None:
        self.names, self.text = names, ""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert kind is not None, f"expected an error that names {self.names}"
        if not isinstance(error, UserError):
            return False
        self.text = str(error)
        assert "\n" not in self.text
        assert all(name in self.text for name in self.names), self.text
        return True
