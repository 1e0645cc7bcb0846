"""Learned rotations in models that exist: put in, taken out, their own code left as it is."""

from __future__ import annotations

from comrope.integrations.language import LANGUAGE_MODELS
from comrope.integrations.swapping import swap, unswap

__all__ = ["LANGUAGE_MODELS", "swap", "unswap"]
