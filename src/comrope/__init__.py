"""Rotary position embeddings whose rotations are learned, in any number of dimensions."""

from comrope import analysis
from comrope.methods import METHODS
from comrope.positions import grid, perturb, relative, shift, with_class_token
from comrope.rotary import RotaryEmbedding

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "RotaryEmbedding",
    "analysis",
    "grid",
    "perturb",
    "relative",
    "shift",
    "with_class_token",
]
