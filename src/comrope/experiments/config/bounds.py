"""The accepted values of a field: its type and its bounds, in messages and in descriptions."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from comrope._json import is_unicode

__all__ = ["LONGEST_LIST", "Bounds", "expected"]

LONGEST_TEXT = 4096  # characters, as of a path
LONGEST_LIST = 100  # values
NAMES = {bool: "true or false", int: "an integer", float: "a number"}
PLURALS = {int: "integers", float: "numbers"}
# In texts; they would break a line, or command a terminal. A path may have any other character.
CONTROLS = {*range(32), *range(127, 160), 0x2028, 0x2029}


@dataclass(frozen=True)
class Bounds:
    """The accepted values of a field. Numbers are finite in any case.

    Args:
        choices: The accepted texts; by default any.
        minimum: The smallest number.
        above: A number that the value must exceed, instead of ``minimum``.
        maximum: The largest number.
        below: A number that the value must not reach, instead of ``maximum``.
        shortest, longest: The smallest and the largest number of values of a list, or of
            characters of a text.
        ordered: Whether the first of two values is at most the second.
        nonzero: Whether one of several values differs from zero.

    Of a list, the bounds of numbers hold for each value.
    """

    choices: tuple[str, ...] = ()
    minimum: float = 0
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    shortest: int = 0
    longest: int | None = None  # by default LONGEST_LIST and LONGEST_TEXT
    ordered: bool = False
    nonzero: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a value of the right type is within the bounds."""
        if isinstance(value, tuple):
            return (
                self.shortest <= len(value) <= (self.longest or LONGEST_LIST)
                and all(map(self.accepts, value))
                and not (self.ordered and value[0] > value[1])
                and not (self.nonzero and value and not any(value))
            )
        if isinstance(value, str):
            chosen = not self.choices or value in self.choices
            fits = self.shortest <= len(value) <= (self.longest or LONGEST_TEXT)
            return chosen and fits and _is_plain(value)
        if isinstance(value, bool) or value is None:
            return True
        low = value >= self.minimum if self.above is None else value > self.above
        high = self.maximum is None or value <= self.maximum
        return low and high and (self.below is None or value < self.below) and math.isfinite(value)

    @property
    def range(self) -> str:
        """The bounds of a number, in words."""
        least = _number(self.minimum)
        if self.above is None and self.maximum is not None:
            return f"from {least} to {_number(self.maximum)}"
        words = [f"of at least {least}" if self.above is None else f"above {_number(self.above)}"]
        words += [] if self.maximum is None else [f"up to {_number(self.maximum)}"]
        words += [] if self.below is None else [f"below {_number(self.below)}"]
        return " and ".join(words)


def expected(kind: Any, bounds: Bounds) -> str:
    """Return the accepted values of a field in words, such as "a number above 0 and up to 1".

    Args:
        kind: The type of the field.
        bounds: Its bounds.
    """
    some = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    (kind,) = (each for each in some if each is not types.NoneType)
    text = _of_list(kind, bounds) if typing.get_origin(kind) is tuple else _of_one(kind, bounds)
    return f"{text}, or null" if types.NoneType in some else text


def _of_one(kind: Any, bounds: Bounds) -> str:
    if bounds.choices:
        return f"one of {', '.join(bounds.choices)}"
    if kind is str:
        least = f"{bounds.shortest} to" if bounds.shortest else "up to"
        most = bounds.longest or LONGEST_TEXT
        return f"a text of {least} {most} characters in UTF-8, on one line"
    return f"{NAMES[kind]} {bounds.range}" if kind in PLURALS else NAMES[kind]


def _of_list(kind: Any, bounds: Bounds) -> str:
    element, *rest = typing.get_args(kind)
    some = f"{bounds.shortest} to" if bounds.shortest else "up to"
    most = bounds.longest or LONGEST_LIST
    count = f"{some} {most}" if rest == [Ellipsis] else str(1 + len(rest))
    text = f"{count} {PLURALS[element]} {bounds.range}"
    text += ", the first at most the second" if bounds.ordered else ""
    return text + (", not all of them 0" if bounds.nonzero else "")


def _is_plain(text: str) -> bool:
    """Return whether a text can be stored in a recipe and printed on one line."""
    return CONTROLS.isdisjoint(map(ord, text)) and is_unicode(text)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
