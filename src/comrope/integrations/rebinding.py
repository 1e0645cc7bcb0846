"""Another meaning for one name in a function of somebody else's, for one caller alone.

The function's own code runs, in a copy of its module's names in which that one name is ours.
Nothing of theirs is changed or written again: other callers go on with the function as it was.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ROTATION", "names_in", "rebind_forward", "rebound", "restore_forward", "still_there"]

ROTATION = "comrope"  # the name of what each attention layer gets


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


class Forward:
    """Another forward pass for one layer. An object and not a bound method: those are pickled by
    name, and would come back as the layer's own. It does not keep the layer, which keeps it: a
    model that nobody keeps must be gone at once, not when Python looks for rings."""

    def __init__(self, layer: nn.Module, make: Callable[[type], Callable[..., Any]]) -> None:
        self.__setstate__((layer, make))

    def __getstate__(self) -> tuple[nn.Module, Callable[[type], Callable[..., Any]]]:
        return self._layer(), self.make

    def __setstate__(self, state: tuple[nn.Module, Callable[[type], Callable[..., Any]]]) -> None:
        layer, self.make = state
        self._layer: Any = weakref.ref(layer)
        self.function = self.make(type(layer))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(still_there(self._layer), *args, **kwargs)


def still_there(layer: Any) -> nn.Module:
    """The layer that a weak reference is of."""
    found = layer()
    if found is None:
        raise RuntimeError(
            "a part of a swapped layer was copied and the layer itself is gone: copy swapped "
            "models and layers with copy.deepcopy, not copy.copy"
        )
    return found


def rebind_forward(layer: nn.Module, make: Callable[[type], Callable[..., Any]]) -> None:
    """Another forward pass for this layer alone: what ``make`` gives for its class."""
    setattr(layer, _door_of(layer), Forward(layer, make))


def restore_forward(layer: nn.Module) -> None:
    """The layer's own again, if it has another."""
    door = _door_of(layer)
    if isinstance(vars(layer).get(door), Forward):
        if door == "forward":
            del layer.forward
        else:
            setattr(layer, door, types.MethodType(type(layer).forward, layer))


def _door_of(layer: nn.Module) -> str:
    """Where a call arrives: beyond the hooks of Accelerate, which ``device_map`` puts there."""
    return "_old_forward" if "_old_forward" in vars(layer) else "forward"
