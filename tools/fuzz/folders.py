"""Targets whose input is a script of edits to the files of a valid folder."""

from __future__ import annotations

import json
import random
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from fuzz import edits
from fuzz.target import Target

__all__ = ["FolderTarget", "contents"]


class FolderTarget(Target):
    """A reader of a folder.

    Attributes:
        more: Further edits, by name.
    """

    more: ClassVar[Mapping[str, Callable[[Path], None]]] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.valid, self.case = folder / "valid", folder / "case"
        if self.valid.exists():
            shutil.rmtree(self.valid)
        self.create(self.valid)
        self.before = contents(self.valid)

    @abstractmethod
    def create(self, folder: Path) -> None:
        """Write a valid folder; the same bytes every time."""

    @abstractmethod
    def judge(self, case: Path) -> bool:
        """Judge the reader with an edited copy; return whether it accepts the folder."""

    def seeds(self) -> list[bytes]:
        return [b"[]"]

    def examine(self, data: bytes) -> bool:
        if (script := edits.parse(data)) is None:
            return False
        if self.case.exists():
            shutil.rmtree(self.case)
        shutil.copytree(self.valid, self.case)
        edits.apply(script, self.case, self.more)
        return self.judge(self.case)

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        own = edits.draw(self.valid, rng, list(self.more))
        kept = edits.parse(data) or []
        script = own if rng.random() < 0.5 else [*kept[:3], *own]
        return json.dumps(script).encode()

    def changed(self, case: Path) -> set[str]:
        """Return the names of the files that differ from those of the valid folder."""
        now = contents(case)
        return {name for name in now | self.before if now.get(name) != self.before.get(name)}


def contents(folder: Path) -> dict[str, Any]:
    """Return the bytes of every file by name; its kind for what is no file."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            found[name] = "special"
        elif path.is_file():
            large = path.stat().st_size > 2**24
            found[name] = f"large {path.stat().st_size}" if large else path.read_bytes()
        elif not any(path.iterdir()):
            found[name] = "folder"
    return found
