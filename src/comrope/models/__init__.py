"""Transformers with learned rotations. Importing this package registers the ViTs with timm."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from comrope.models.registry import SIZES, create_model
from comrope.models.vit import POSITIONS, ViT

if TYPE_CHECKING:  # type checkers do not call __getattr__
    from comrope.models.gpt import GPT, create_gpt

__all__ = ["GPT", "POSITIONS", "SIZES", "ViT", "create_gpt", "create_model"]


def __getattr__(name: str) -> Any:
    if name not in ("GPT", "create_gpt"):
        raise AttributeError(f"module 'comrope.models' has no attribute {name!r}")
    return getattr(importlib.import_module("comrope.models.gpt"), name)
