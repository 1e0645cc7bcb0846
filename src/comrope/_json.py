"""Read JSON files: limits on size and depth, and a schema of the content.

A schema is a ``Kind`` of one value, ``Items`` of a list, or ``Entries`` of names and values. Every
error is a ``ValueError`` in one line. It names the entry, what came and what was expected.
"""

from __future__ import annotations

import json
import math
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from comrope._checks import name_shown

__all__ = [
    "ANYTHING",
    "COUNT",
    "NUMBER",
    "SHA256",
    "TEXT",
    "Entries",
    "Items",
    "Kind",
    "Nullable",
    "Schema",
    "check",
    "constant",
    "decode",
    "is_unicode",
    "parse",
    "read",
    "read_bytes",
]

LARGEST = 2**24  # bytes of a file
DEEPEST = 40  # lists and entries inside each other


class Fault(NamedTuple):
    """What is wrong with a value, and in which entry it is."""

    where: str
    what: str

    def inside(self, part: str | int) -> Fault:
        """Return the fault as one of the value that contains this one."""
        name = f"[{part}]" if isinstance(part, int) else name_shown(part)
        dot = "." if self.where and not self.where.startswith("[") else ""
        return Fault(f"{name}{dot}{self.where}", self.what)


class Schema(Protocol):
    """The form of a value."""

    @property
    def expected(self) -> str:
        """Its name in messages."""

    def fault(self, value: Any) -> Fault | None:
        """Return the first thing that is wrong with a value, or None."""


@dataclass(frozen=True)
class Kind:
    """The form of one value.

    Args:
        expected: Its name in messages.
        accepts: Function from a value to whether it has this form.
    """

    expected: str
    accepts: Callable[[Any], bool]

    def fault(self, value: Any) -> Fault | None:
        return None if self.accepts(value) else _unexpected(self, value)


ANYTHING = Kind("anything", lambda value: True)


@dataclass(frozen=True)
class Items:
    """A list of values of one form."""

    of: Schema
    expected: str = "a list"

    def fault(self, value: Any) -> Fault | None:
        if not isinstance(value, list):
            return _unexpected(self, value)
        for number, each in enumerate(value):
            if (fault := self.of.fault(each)) is not None:
                return fault.inside(number)
        return None


@dataclass(frozen=True)
class Entries:
    """Names and values.

    Args:
        required: The form of entries that must exist.
        optional: The form of entries that may exist.
        others: The form of all other entries; None refuses them.
    """

    required: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)
    others: Schema | None = ANYTHING
    expected: str = "names and values"

    def fault(self, value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return _unexpected(self, value)
        for name, form in self.required.items():
            if name not in value:
                return Fault("", f"expected {form.expected}, got nothing").inside(name)
            if (fault := form.fault(value[name])) is not None:
                return fault.inside(name)
        for name, each in value.items():
            other = self.optional.get(name, self.others)
            if name in self.required:
                continue
            fault = Fault("", "unknown entry") if other is None else other.fault(each)
            if fault is not None:
                return fault.inside(name)
        return None


@dataclass(frozen=True)
class Nullable:
    """A form that also accepts null."""

    of: Schema

    @property
    def expected(self) -> str:
        return f"{self.of.expected} or null"

    def fault(self, value: Any) -> Fault | None:
        return None if value is None else self.of.fault(value)


def constant(expected: Any) -> Kind:
    """Return the form of one value only."""

    def accepts(value: Any) -> bool:
        return type(value) is type(expected) and value == expected

    return Kind(repr(expected), accepts)


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is larger than any float
        return False


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef")


TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a finite number", _is_number)
COUNT = Kind("an integer of at least 0", lambda value: type(value) is int and value >= 0)
SHA256 = Kind("a SHA-256 of 64 digits", _is_sha256)


def read(path: Path, schema: Schema, *, largest: int = LARGEST) -> Any:
    """Return the content of a JSON file.

    Args:
        path: The file.
        schema: The form of its content.
        largest: The largest accepted size, in bytes.

    Raises:
        OSError: The file does not exist or cannot be read.
        ValueError: It is not such a file; the message does not contain the path.
    """
    return parse(read_bytes(path, largest=largest), schema)


def read_bytes(path: Path, *, largest: int = LARGEST) -> bytes:
    """Return the content of a regular file; raise as ``read`` does."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):  # reading a pipe or a device may not end
        raise ValueError("expected a file, got something else")
    if about.st_size > largest:
        raise ValueError(f"expected at most {largest} bytes, got {about.st_size}")
    return path.read_bytes()


def parse(content: str | bytes, schema: Schema) -> Any:
    """Return a value from JSON, in UTF-8; raise ``ValueError`` if it does not have its form."""
    value = decode(content)
    _check_plain(value)
    check(value, schema)
    return value


def decode(content: str | bytes) -> Any:
    """Return a value of any form from JSON, in UTF-8; raise ``ValueError`` if it is none.

    For files that are too large for ``parse``, which visits every value. The caller checks what it
    uses: texts may contain halves of surrogate pairs, and lists may be deeply nested.
    """
    try:
        if isinstance(content, bytes):
            content = content.decode("utf-8")  # frees the bytes of a large file
        return json.loads(content, object_pairs_hook=_entries)
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, got other bytes at {error.start}") from None
    except ValueError as error:
        raise ValueError(f"expected JSON ({error})") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def check(value: Any, schema: Schema) -> None:
    """Raise ``ValueError`` unless a value has its form."""
    if (fault := schema.fault(value)) is not None:
        raise ValueError(f"{fault.where}: {fault.what}" if fault.where else fault.what)


_TOO_DEEP = f"expected at most {DEEPEST} lists and entries inside each other, got more"


def _unexpected(schema: Schema, value: Any) -> Fault:
    return Fault("", f"expected {schema.expected}, got {reprlib.repr(value)}")


def _entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {reprlib.repr(twice)} appears twice")
    return found


def _check_plain(value: Any) -> None:
    """Raise for values that other code cannot use: nested too deeply, or no Unicode text."""
    level = [value]
    for depth in range(DEEPEST + 1):
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, (dict, list)):
                if depth == DEEPEST:
                    raise ValueError(_TOO_DEEP)
                deeper += each
                deeper += each.values() if isinstance(each, dict) else ()
            elif isinstance(each, str) and not each.isascii() and not is_unicode(each):
                raise ValueError(f"expected Unicode, got {reprlib.repr(each)}")
        level = deeper


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded; the bytes of a path may be no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
