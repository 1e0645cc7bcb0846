"""Another meaning for one name in a function of somebody else's, for one caller alone.

The function's own code runs, in a copy of its module's names in which that one name is ours.
Nothing of theirs is changed or written again: other callers go on with the function as it was.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["names_in", "rebind_forward", "rebound", "restore_forward"]

OURS = "comrope_forward"  # the mark of a forward pass that is not a layer's own


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


def rebind_forward(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Another forward pass for this layer alone."""
    setattr(forward, OURS, True)
    setattr(layer, _door_of(layer), types.MethodType(forward, layer))


def restore_forward(layer: nn.Module) -> None:
    """The layer's own again, if it has another."""
    door = _door_of(layer)
    if hasattr(vars(layer).get(door), OURS):
        if door == "forward":
            del layer.forward
        else:
            setattr(layer, door, types.MethodType(type(layer).forward, layer))


def _door_of(layer: nn.Module) -> str:
    """Where a call arrives: beyond the hooks of Accelerate, which ``device_map`` puts there."""
    return "_old_forward" if "_old_forward" in vars(layer) else "forward"
