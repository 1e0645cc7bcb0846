"""The identity of a run: a hash of the fields that decide what is learned."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from comrope._files import sha256_of
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import shown
from comrope.experiments.config.build import flat, option_fields
from comrope.experiments.config.config import Config
from comrope.experiments.config.recipes import load_recipe, read_sections
from comrope.experiments.config.schema import TIMM

__all__ = [
    "CONFIG",
    "RUNTIME",
    "decisive",
    "differences",
    "hash_fields",
    "non_default",
    "read_config",
    "run_id",
    "run_name",
    "runtime",
    "start_id",
]

CONFIG = "config.yaml"  # in the folder of a run
IDENTITY = 2  # version of the hash; identity-2.json contains the defaults of the fields
LONGEST = 300  # characters of an identity
STORED = "@"  # prefix of the identity of a run that has no folder here
NAMED = re.compile(r".+-b\d+-p[\d.e+-]+-s\d+-(?P<id>[0-9a-f]{12})")  # of run_name
_parents: ContextVar[tuple[Path, ...]] = ContextVar("parents", default=())
# Fields that do not change what is learned: a run may be resumed with other values.
RUNTIME = frozenset(
    name for name, field in option_fields(Config).items() if field.metadata["runtime"]
)


def run_id(config: Config, parent: str | None = None) -> str:
    """Return the identity of a run: 12 hexadecimal digits.

    It is a hash of the fields that decide what is learned and differ from their defaults. So a new
    field does not change it. ``train.start_from`` is replaced by the result of ``start_id``.

    Args:
        config: The configuration of the run.
        parent: The identity of the initial weights; by default that of ``start_id``.
    """
    return hash_fields(non_default(config, parent))


def run_name(config: Config, parent: str | None = None) -> str:
    """Return the name of a run's folder, which ends with the run's identity."""
    model, train = config.model, config.train
    return (
        f"{model.position}-b{model.block_size}-p{train.perturbation:g}-s{train.seed}"
        f"-{run_id(config, parent)}"
    )


def hash_fields(fields: dict[str, Any]) -> str:
    """Return the identity of a run from its ``non_default`` fields."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"comrope-run/{IDENTITY}\n{text}".encode()).hexdigest()[:12]


def start_id(start: str | None, stored: str | None = None) -> str | None:
    """Return the identity of initial weights, which does not depend on their location.

    Args:
        start: The value of ``train.start_from``.
        stored: The identity that was stored earlier, for weights that no longer exist.

    Returns:
        None for random weights; ``timm:NAME`` for weights of timm; ``file:`` and the SHA-256 of a
        file; the identity of a run, from the name of its folder or from its configuration. If the
        path does not exist and its name contains no identity: ``stored``, else the name.
    """
    if not start or start.startswith(TIMM):
        return start or None
    if start.startswith(STORED):
        return start.removeprefix(STORED)
    path = Path(os.path.abspath(start))
    if named := NAMED.fullmatch(path.name):
        return named["id"]
    try:
        is_run, is_file = (path / CONFIG).is_file(), path.is_file()
    except OSError:  # such as a name that is too long: nothing exists there
        is_run = is_file = False
    if is_run:
        with _once(path):
            return run_id(*read_config(path))
    if is_file:
        about = path.stat()
        return _file_id(path, about.st_size, about.st_mtime_ns)
    return stored or path.name


def read_config(folder: Path) -> tuple[Config, str | None]:
    """Return the configuration of a run, and the stored identity of its initial weights, if any.

    A run stores that identity when it begins, so that it can be resumed without its parent.

    Raises:
        UserError: The folder has no configuration, or an invalid one.
    """
    path = folder / CONFIG
    config = load_recipe(path)
    parent = read_sections(path).get("parent")
    if parent is not None and not (isinstance(parent, str) and 0 < len(parent) <= LONGEST):
        raise UserError(f"{path}: parent: expected an identity, got {shown(parent)}")
    # Folders are often moved together: the parent may be next to this folder now.
    start = folder.parent / _last_part(config.train.start_from)
    if parent is None and config.train.start_from and (start / CONFIG).is_file():
        with _once(start):
            parent = run_id(*read_config(start))
    return config, parent


def decisive(config: Config, parent: str | None = None) -> dict[str, Any]:
    """Return the fields that decide what is learned, by dotted name."""
    found = {name: value for name, value in flat(config).items() if name not in RUNTIME}
    found["train.start_from"] = parent or start_id(config.train.start_from)
    return found


def non_default(config: Config, parent: str | None = None) -> dict[str, Any]:
    """Return the fields that decide what is learned and differ from their defaults."""
    usual = _defaults()
    return {
        name: value
        for name, value in decisive(config, parent).items()
        if (None if value == "" else value) != usual.get(name)
    }


def runtime(config: Config) -> dict[str, Any]:
    """Return the fields that do not decide what is learned, by dotted name."""
    return {name: value for name, value in sorted(flat(config).items()) if name in RUNTIME}


def differences(mine: Config, theirs: Config, parent: str | None = None) -> list[str]:
    """Return the fields that decide what is learned and differ, as "name: mine, not theirs".

    Args:
        mine: A configuration.
        theirs: Another one.
        parent: The identity of the initial weights of ``theirs``, if it is known.
    """
    same = _last_part(mine.train.start_from) == _last_part(theirs.train.start_from)
    own = start_id(mine.train.start_from, parent if same else None)
    a, b = decisive(mine, own), decisive(theirs, parent)
    return [
        f"{name}: {a.get(name)!r}, not {b.get(name)!r}"
        for name in a | b
        if a.get(name) != b.get(name)
    ]


def _last_part(start: str | None) -> str:
    return Path(os.path.abspath(start)).name if start else ""


@contextlib.contextmanager
def _once(folder: Path) -> Iterator[None]:
    """Raise if the identity of a run depends on itself."""
    parents = _parents.get()
    if folder in parents:
        raise UserError(f"{folder / CONFIG}: train.start_from: expected other weights than its own")
    before = _parents.set((*parents, folder))
    try:
        yield
    finally:
        _parents.reset(before)


@functools.cache
def _defaults() -> dict[str, Any]:
    return {name: None if value == "" else value for name, value in decisive(Config()).items()}


@functools.lru_cache
def _file_id(path: Path, size: int, time: int) -> str:
    """Return the hash of a file; computed again if its size or time changes."""
    return f"file:{sha256_of(path)}"
