"""Rotary position embeddings whose rotations are learned, in any number of dimensions.

``import comrope`` loads no torch. A name that needs torch loads it when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from comrope.methods import METHODS

if TYPE_CHECKING:  # type checkers and editors do not call __getattr__
    from comrope import analysis, inits, models, scaling
    from comrope.integrations.api import swap, unswap
    from comrope.integrations.fold import fold
    from comrope.models import create_gpt, create_model
    from comrope.optim import parameter_groups
    from comrope.positions import grid, normalize, perturb, shift, with_class_token
    from comrope.rotary import RotaryEmbedding
    from comrope.rotation_files import load_rotations, save_rotations
    from comrope.scaling import scaled

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "RotaryEmbedding",
    "analysis",
    "create_gpt",
    "create_model",
    "fold",
    "grid",
    "inits",
    "load_rotations",
    "models",
    "normalize",
    "parameter_groups",
    "perturb",
    "save_rotations",
    "scaled",
    "scaling",
    "shift",
    "swap",
    "unswap",
    "with_class_token",
]

_MODULE_OF = {
    "RotaryEmbedding": "rotary",
    "create_gpt": "models",
    "create_model": "models",
    "fold": "integrations",
    "grid": "positions",
    "load_rotations": "rotation_files",
    "normalize": "positions",
    "parameter_groups": "optim",
    "perturb": "positions",
    "relative": "positions",  # deprecated
    "rescale": "positions",  # deprecated
    "save_rotations": "rotation_files",
    "scaled": "scaling",
    "shift": "positions",
    "swap": "integrations",
    "unswap": "integrations",
    "with_class_token": "positions",
}
_SUBMODULES = (
    "analysis", "angles", "inits", "integrations", "models", "ops", "optim", "positions", "rotary",
    "scaling",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, and keep it."""
    if name not in _MODULE_OF and name not in _SUBMODULES:
        raise AttributeError(f"module 'comrope' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"comrope.{_MODULE_OF.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "comrope":
            raise
        raise ModuleNotFoundError(
            f"comrope.{name} needs {error.name}, which is not installed: "
            "pip install 'comrope[train]'",
            name=error.name,
        ) from None
    value = module if name in _SUBMODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


if "timm" in sys.modules:  # imported first: register our models with it
    importlib.import_module("comrope.models")
