"""Rotary position embeddings whose rotations are learned, in any number of dimensions."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from comrope import analysis
from comrope.methods import METHODS
from comrope.optim import parameter_groups
from comrope.positions import grid, perturb, relative, rescale, shift, with_class_token
from comrope.rotary import RotaryEmbedding

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "RotaryEmbedding",
    "analysis",
    "create_model",
    "fold",
    "grid",
    "models",
    "parameter_groups",
    "perturb",
    "relative",
    "rescale",
    "shift",
    "swap",
    "unswap",
    "with_class_token",
]

# What needs more than torch is loaded when it is first asked for.
LAZY = {
    "create_model": ("comrope.models", "create_model"),
    "fold": ("comrope.integrations", "fold"),
    "models": ("comrope.models", None),
    "swap": ("comrope.integrations", "swap"),
    "unswap": ("comrope.integrations", "unswap"),
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'comrope' has no attribute {name!r}")
    module_name, attribute = LAZY[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "comrope":
            raise
        raise ModuleNotFoundError(
            f"comrope.{name} needs {error.name}, which is not installed: "
            "pip install 'comrope[train]'",
            name=error.name,
        ) from None
    return module if attribute is None else getattr(module, attribute)


if "timm" in sys.modules:  # so that timm knows our models without being asked twice
    importlib.import_module("comrope.models")
