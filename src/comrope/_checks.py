"""Argument checks. Their errors name the argument, what came and what was expected, in one line."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

__all__ = [
    "boolean",
    "integer",
    "name_shown",
    "nonfinite",
    "one_line",
    "one_of",
    "per_axis",
    "real",
]

LONGEST_NAME = 60  # characters in a message
LONGEST = 500  # characters of another library's message


def one_of(label: str, value: Any, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    choices = tuple(choices)
    if isinstance(value, str) and value in choices:
        return value
    hint = ""
    if isinstance(value, str):
        import difflib  # rarely needed, and import comrope is light

        if near := difflib.get_close_matches(value.lower(), choices, 1):
            hint = f"; did you mean {near[0]!r}?"
    raise ValueError(f"{label}: expected one of {', '.join(choices)}, got {value!r}{hint}")


def boolean(label: str, value: Any) -> bool:
    """Return ``value`` if it is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{label}: expected True or False, got {value!r}")
    return value


def integer(label: str, value: Any, least: int) -> int:
    """Return ``value`` as an int if it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{label}: expected an integer of at least {least}, got {value!r}")
    return int(value)


def real(label: str, value: Any, *, positive: bool = False) -> float:
    """Return ``value`` as a float if it is finite and not negative, or positive if ``positive``."""
    kind = "a positive" if positive else "a non-negative"
    number = float(value) if isinstance(value, Real) else math.nan
    if not 0 <= number < math.inf or (positive and number == 0):
        raise ValueError(f"{label}: expected {kind} finite number, got {value!r}")
    return number


def per_axis(label: str, value: Any, num_axes: int, *, positive: bool = False) -> tuple[float, ...]:
    """Return one number for every axis, from one number for all or one per axis."""
    if isinstance(value, Real):
        value = (value,) * num_axes
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ValueError(f"{label}: expected a number or {num_axes} of them, got {value!r}")
    values = tuple(value)
    if len(values) != num_axes:
        raise ValueError(f"{label}: expected one number or {num_axes}, got {len(values)}")
    return tuple(real(label, v, positive=positive) for v in values)


def nonfinite(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors with NaN or infinite values."""
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]


def one_line(error: object) -> str:
    """Return the message of another library for a message: in one line, without control characters.

    It may contain parts of a file that is not trusted.
    """
    text = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def name_shown(name: str) -> str:
    """Return a name from a file for a message; quoted if it is long or not printable."""
    return name if name.isprintable() and len(name) <= LONGEST_NAME else reprlib.repr(name)
