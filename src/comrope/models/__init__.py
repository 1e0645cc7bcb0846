"""Vision transformers with learned rotations. Importing this package registers them with timm."""

from __future__ import annotations

from comrope.models.registry import SIZES, create_model
from comrope.models.vit import POSITIONS, ViT

__all__ = ["POSITIONS", "SIZES", "ViT", "create_model"]
