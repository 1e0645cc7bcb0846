"""Detectors around a plain ViT: backbone, feature pyramid, heads."""

from __future__ import annotations

from comrope.models.detection.backbone import PlainBackbone
from comrope.models.detection.detector import detector
from comrope.models.detection.pyramid import SimplePyramid, windowed_attention
from comrope.models.detection.timm_weights import Loaded, load_timm_weights

__all__ = [
    "Loaded",
    "PlainBackbone",
    "SimplePyramid",
    "detector",
    "load_timm_weights",
    "windowed_attention",
]
