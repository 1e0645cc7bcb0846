"""Position encodings, one file each: parameters and the angle matrices that they define.

Importing this package loads no torch. A method is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from comrope import _checks

if TYPE_CHECKING:  # type checkers do not call __getattr__
    from comrope.inits import Init
    from comrope.methods.base import Method, batched_angles

__all__ = [
    "METHODS",
    "Method",
    "batched_angles",
    "create_method",
    "has_vanilla_frequencies",
    "label",
    "method_class",
]

_CLASSES = {  # name: module and class
    "rope": "rope:RoPE",
    "rope-mixed": "rope_mixed:RoPEMixed",
    "liere": "liere:LieRE",
    "comrope-ap": "comrope_ap:ComRoPEAP",
    "comrope-ld": "comrope_ld:ComRoPELD",
    "comrope-torus": "comrope_torus:ComRoPETorus",
}
METHODS: tuple[str, ...] = tuple(_CLASSES)


def method_class(name: str) -> type[Method]:
    """Return the class of the method ``name``, one of ``METHODS``."""
    module, cls = _CLASSES[_checks.one_of("method", name, METHODS)].split(":")
    found: type[Method] = getattr(importlib.import_module(f"comrope.methods.{module}"), cls)
    return found


def create_method(name: str, **options: Any) -> Method:
    """Create the method ``name``, one of ``METHODS``."""
    return method_class(name)(**options)


def label(name: str) -> str:
    """Return the name of a method in tables and figures."""
    return method_class(name).label or name


def has_vanilla_frequencies(name: str, init: str | Init) -> bool:
    """Return whether a method starts with frequencies of vanilla RoPE, per patch or token."""
    from comrope.inits import PlaneInit  # imported here, because it loads torch

    return isinstance(method_class(name).parse_init(init), PlaneInit)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'comrope.methods' has no attribute {name!r}")
    return getattr(importlib.import_module("comrope.methods.base"), name)
