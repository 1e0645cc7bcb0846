"""Detectors around a plain ViT: backbone, feature pyramid, heads."""

from __future__ import annotations

from comrope.models.detection.backbone import Loaded, PlainBackbone, load_timm_weights
from comrope.models.detection.detector import detector
from comrope.models.detection.pyramid import SimplePyramid, windowed_attention

__all__ = [
    "Loaded",
    "PlainBackbone",
    "SimplePyramid",
    "detector",
    "load_timm_weights",
    "windowed_attention",
]
