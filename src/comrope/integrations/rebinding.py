"""Replace one global name in a function of another library, for some layers only.

The code of the function runs with a copy of its module's globals, in which one name is replaced.
The other library is not changed: other callers get the original function.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = [
    "ROTATION",
    "VALUES",
    "deref",
    "names_in",
    "replace_forward",
    "restore_forward",
    "with_global_replaced",
]

ROTATION = "comrope"  # the name of the rotation in each attention layer
VALUES = "comrope_values"  # of the rotation of values, if there is one


def names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the global names and attributes that the code of a function uses."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def with_global_replaced(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    """Return a function without decorators, in a copy whose global ``name`` is ``value``."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType) or name not in inner.__code__.co_names:
        raise ValueError(f"function: expected one that uses {name}, got {function!r}")
    names = {**inner.__globals__, name: value}
    copy = types.FunctionType(
        inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


class Forward:
    """Another forward pass for one layer.

    An object, because a bound method is pickled by name and would be loaded as the layer's own
    method. The reference to the layer is weak: with a reference cycle, a deleted model would occupy
    memory until the next garbage collection.
    """

    def __init__(self, layer: nn.Module, make: Callable[[type], Callable[..., Any]]) -> None:
        self.__setstate__((layer, make))

    def __getstate__(self) -> tuple[nn.Module, Callable[[type], Callable[..., Any]]]:
        return self._layer(), self.make

    def __setstate__(self, state: tuple[nn.Module, Callable[[type], Callable[..., Any]]]) -> None:
        layer, self.make = state
        self._layer: Any = weakref.ref(layer)
        self.function = self.make(type(layer))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(deref(self._layer), *args, **kwargs)


def deref(layer: Any) -> nn.Module:
    """Return the object of a weak reference."""
    found = layer()
    if found is None:
        raise RuntimeError(
            "layer: was deleted, and a shallow copy of one of its parts was called; copy swapped "
            "models and layers with copy.deepcopy, not copy.copy"
        )
    return found


def replace_forward(layer: nn.Module, make: Callable[[type], Callable[..., Any]]) -> None:
    """Give one layer the forward pass that ``make`` returns for its class."""
    setattr(layer, _forward_attribute(layer), Forward(layer, make))


def restore_forward(layer: nn.Module) -> None:
    """Undo ``replace_forward``, if it was applied."""
    name = _forward_attribute(layer)
    if isinstance(vars(layer).get(name), Forward):
        if name == "forward":
            del layer.forward
        else:
            setattr(layer, name, types.MethodType(type(layer).forward, layer))


def _forward_attribute(layer: nn.Module) -> str:
    """Return the attribute to replace; Accelerate (``device_map``) keeps it in ``_old_forward``."""
    return "_old_forward" if "_old_forward" in vars(layer) else "forward"
