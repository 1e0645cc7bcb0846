"""Learned rotations in models that exist: put in, taken out, their own code left as it is."""

from __future__ import annotations

from comrope.integrations.absolute import VISION_MODELS
from comrope.integrations.folding import fold
from comrope.integrations.rotating import ROTATING_MODELS
from comrope.integrations.swapping import swap, unswap
from comrope.integrations.timm_models import TIMM_MODELS

__all__ = ["ROTATING_MODELS", "TIMM_MODELS", "VISION_MODELS", "fold", "swap", "unswap"]
