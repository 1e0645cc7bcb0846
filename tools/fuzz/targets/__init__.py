"""The targets by name, one file each."""

from __future__ import annotations

import importlib
from pathlib import Path

from fuzz.target import Target

__all__ = ["NAMES", "create"]

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.stem != "__init__"))


def create(name: str, folder: Path) -> Target:
    """Return a target, whose files are in a folder that is created.

    Raises:
        ImportError: A library that the reader needs is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target: Target = importlib.import_module(f"fuzz.targets.{name}").Fuzz(folder)
    return target
