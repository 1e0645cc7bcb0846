"""The base class of targets: a reader, valid inputs, mutations, and checks of its answers."""

from __future__ import annotations

import io
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from fuzz import judge, trees

__all__ = ["Target", "mutate_bytes", "mutate_text"]


class Target(ABC):
    """A reader to be fuzzed.

    An input is the content of a file, or a script of edits (``edits``). ``run`` writes files,
    calls the reader, and raises ``judge.Finding`` if the reader does what it must not do.

    Args:
        folder: An empty folder for files. The target may write nowhere else.

    Attributes:
        suffix: Of files with inputs.
        longest: The largest input, in bytes.
        errors: The types of errors with which the reader may refuse an input.
        tolerated: The types of warnings that the reader may raise.
    """

    suffix: ClassVar[str] = ".json"
    longest: ClassVar[int] = 2**14
    errors: tuple[type[Exception], ...] = ()
    tolerated: ClassVar[tuple[type[Warning], ...]] = ()
    alarm = True  # whether to interrupt an input that needs too long; libFuzzer does it itself

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Return inputs that the reader accepts."""

    def run(self, data: bytes) -> bool:
        """Judge one input; return whether the reader accepts it.

        Raises:
            judge.Finding: The reader does what it must not do.
        """
        try:
            return self.examine(data)
        except judge.Finding:
            raise
        except Exception as error:  # with an accepted value, for example when it is written
            raise judge.unexpected(error) from error

    @abstractmethod
    def examine(self, data: bytes) -> bool:
        """Judge one input, as ``run`` does."""

    @abstractmethod
    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        """Return another input."""

    def ask(self, read: Callable[[], Any], *names: object) -> judge.Answer:
        """Call the reader; a refusal must contain one of the names."""
        return judge.ask(read, names=names, errors=self.errors)

    def watched(self) -> AbstractContextManager[io.StringIO]:
        """Watch what the reader does within the block; see ``judge.watched``."""
        return judge.watched(self.folder, alarm=self.alarm, tolerated=self.tolerated)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with one change: flipped, replaced, removed, repeated, or cut off."""
    content = bytearray(data)
    if not content:
        return bytes([rng.randrange(256)])
    first = rng.randrange(len(content))
    last = min(len(content), first + rng.choice((1, 2, 4, 8, 64, 512)))
    how = rng.randrange(6)
    if how == 0:
        content[first] ^= 1 << rng.randrange(8)
    elif how == 1:
        content[first:last] = rng.randbytes(last - first)
    elif how == 2:
        del content[first:last]
    elif how == 3:
        content[first:first] = content[first:last]
    elif how == 4:
        del content[first:]
    else:
        content[first:last] = bytes([rng.choice((0, 32, 48, 57, 127, 128, 255))]) * (last - first)
    return bytes(content)


def mutate_text(data: bytes, rng: random.Random, *, yaml: bool = False) -> bytes:
    """Return a JSON or YAML text with a change of its tree, or of its bytes."""
    try:
        if rng.random() < 0.15:
            return mutate_bytes(data, rng)
        text = data.decode()
        tree = trees.parse_yaml(text) if yaml else trees.parse_json(text)
        return trees.dump(trees.mutate(tree, rng), yaml=yaml).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
