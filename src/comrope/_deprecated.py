"""Old names: they work for one release, with a warning that names their successor."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

__all__ = ["renamed", "renamed_keywords", "warn_deprecated"]

Function = TypeVar("Function", bound=Callable[..., Any])


def warn_deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that ``new`` replaces ``old``; by default at the line that calls the caller."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=stacklevel)


def renamed(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module, which resolves old names: {old: new}."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_deprecated(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return find


def renamed_keywords(names: Mapping[str, str]) -> Callable[[Function], Function]:
    """Make a function accept old names of its keywords, with a DeprecationWarning.

    Args:
        names: The new name for every old one.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def accept(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{old}: is the old name of {new}; expected one of them")
                warn_deprecated(f"{old}=", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(Function, accept)

    return decorate
