"""Which fields decide what is learned, and where two configurations differ in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from comrope.experiments.config.build import flat, option_fields
from comrope.experiments.config.schema import Config

__all__ = ["RUNTIME", "decisive", "differences", "runtime"]

# Fields that do not decide what is learned: a run may be resumed with others.
RUNTIME = frozenset(
    name for name, field in option_fields(Config).items() if field.metadata["runtime"]
)


def decisive(config: Config) -> dict[str, Any]:
    """Return the fields that decide what is learned, by dotted name."""
    found = {name: value for name, value in flat(config).items() if name not in RUNTIME}
    if config.train.start_from:  # a run is known by its name: folders are moved
        found["train.start_from"] = Path(os.path.abspath(config.train.start_from)).name
    return found


def runtime(config: Config) -> dict[str, Any]:
    """Return the fields that do not decide what is learned, by dotted name."""
    return {name: value for name, value in sorted(flat(config).items()) if name in RUNTIME}


def differences(mine: Config, theirs: Config) -> list[str]:
    """Return the fields that decide what is learned and differ, as "name: mine, there theirs"."""
    a, b = decisive(mine), decisive(theirs)
    return [
        f"{name}: {a.get(name)!r}, there {b.get(name)!r}"
        for name in a | b
        if a.get(name) != b.get(name)
    ]
