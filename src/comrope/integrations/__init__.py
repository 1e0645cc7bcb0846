"""Learned rotations in models that exist: put in, taken out, their own code left as it is."""

from __future__ import annotations

from comrope.integrations.api import swap, unswap
from comrope.integrations.fold import fold
from comrope.integrations.hf_rotary import ROTATING_MODELS
from comrope.integrations.hf_vision import VISION_MODELS
from comrope.integrations.timm_vit import TIMM_MODELS

__all__ = ["ROTATING_MODELS", "TIMM_MODELS", "VISION_MODELS", "fold", "swap", "unswap"]
