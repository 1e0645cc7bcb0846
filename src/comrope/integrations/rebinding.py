"""Another meaning for one name in a function of somebody else's, for one caller alone.

The function's own code runs, in a copy of its module's names in which that one name is ours.
Nothing of theirs is changed or written again: other callers go on with the function as it was.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

__all__ = ["names_in", "rebound"]


def names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """The global names and attributes that a function's own code speaks of."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def rebound(function: Callable[..., Any], name: str, meaning: Any) -> Callable[..., Any]:
    """``function`` with ``name`` meaning something else inside it; what wraps it is left out."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType) or name not in inner.__code__.co_names:
        raise ValueError(f"function: expected one that speaks of {name}, got {function!r}")
    names = {**inner.__globals__, name: meaning}
    copy = types.FunctionType(
        inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy
