"""Messages: values in them, and one line for each."""

from __future__ import annotations

import reprlib
from typing import Any

__all__ = ["name_shown", "one_line", "shown"]

LONGEST = 900  # characters of a message
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: Any) -> str:
    """Return a value for a message: on one line, with some hundred characters at most."""
    try:
        return _repr.repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return "a number of thousands of digits"


def name_shown(name: Any) -> str:
    """Return the name of an unknown field for a message, unchanged if it may be one."""
    plain = isinstance(name, str) and name.replace(".", "_").isidentifier() and len(name) < 60
    return name if plain else shown(name)


def one_line(text: str) -> str:
    """Return a text on one line: spaces for line breaks, escapes for control characters."""
    text = " ".join(line.strip() for line in text.splitlines() if line.strip())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
