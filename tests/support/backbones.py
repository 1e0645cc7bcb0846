"""Small ViTs and backbones for the tests of detection."""

from __future__ import annotations

from comrope.models import ViT
from comrope.models.detection import PlainBackbone


def small(position="comrope-ld", **options):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 2}
    sizes |= {"mlp_ratio": 2.0, "block_size": 4, "init_std": 0.12, "num_classes": 7}
    return ViT(position=position, **{**sizes, **options})


def tokenless(position="comrope-ld", **options):
    return small(position, class_token=False, global_pool="avg", **options)


def in_windows(vit, **options):
    return PlainBackbone(vit, **{"window": 4, "global_blocks": (), **options})
