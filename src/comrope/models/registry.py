"""Models by name: ``vit_base_patch16_224`` here, ``comrope_vit_base_patch16_224`` in timm."""

from __future__ import annotations

import difflib
import re
from typing import Any

from timm.models import build_model_with_cfg, register_model
from torch import nn

from comrope.models.vit import ViT

__all__ = ["SIZES", "create_model"]

# Width, depth and heads. "video" is the paper's model for clips, with a head dimension that three
# axes can share. "nano" and "nanovideo" are for tests and demonstrations.
SIZES: dict[str, dict[str, Any]] = {
    "nano": {"embed_dim": 64, "depth": 3, "num_heads": 2, "init_std": 0.12},
    "nanovideo": {"embed_dim": 96, "depth": 3, "num_heads": 2, "init_std": 0.1},
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "video": {"embed_dim": 384, "depth": 8, "num_heads": 8},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}
NAME = re.compile(r"(?:comrope_)?vit_([a-z]+)_patch(\d{1,9})_(\d{1,9})", re.ASCII)
PLAIN_NAMES = [
    f"vit_{size}_patch{patch}_{resolution}"
    for size in ("tiny", "small", "base", "large")
    for patch, resolution in ((8, 224), (14, 224), (16, 224), (16, 384), (32, 224))
]
IN_TIMM = [f"comrope_{name}" for name in PLAIN_NAMES]


def create_model(name: str, **options: Any) -> ViT:
    """Create a ViT by name.

    Args:
        name: ``vit_{size}_patch{patch}_{resolution}``, for example ``vit_base_patch16_224``, with
            any patch size and training resolution.
        options: Options of ``ViT``, which override the name: ``img_size=(8, 224, 224),
            patch_size=(1, 16, 16)`` makes a model for clips.

    Raises:
        ValueError: The name is not of that form, or has an unknown size.
    """
    if isinstance(name, str) and name.startswith("gpt"):
        raise ValueError(f"name: expected the name of a ViT, got {name!r}; see create_gpt")
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] not in SIZES:
        raise ValueError(
            f"name: expected vit_SIZE_patchP_RESOLUTION, for example vit_base_patch16_224, with "
            f"SIZE one of {', '.join(SIZES)}, got {name!r}{_suggestion(name)}"
        )
    sizes = {"patch_size": int(match[2]), "img_size": int(match[3]), **SIZES[match[1]]}
    return ViT(**{**sizes, **options})


def _suggestion(name: Any) -> str:
    """Return "; did you mean ...?" if a name is similar, else an empty text."""
    close = difflib.get_close_matches(str(name), [*PLAIN_NAMES, *IN_TIMM], 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _register(name: str) -> None:
    def build(pretrained: bool = False, **options: Any) -> nn.Module:
        return build_model_with_cfg(
            lambda **kwargs: create_model(name, **kwargs), name, pretrained, **options
        )

    build.__name__ = name
    register_model(build)


# timm needs a configuration for every name; there are no published weights.
default_cfgs = {
    name: {
        "url": "",
        "input_size": (3, int(name.rsplit("_", 1)[1]), int(name.rsplit("_", 1)[1])),
        "num_classes": 1000,
        "fixed_input_size": False,
        "first_conv": "patches.proj",
        "classifier": "head",
    }
    for name in IN_TIMM
}
for _name in IN_TIMM:
    _register(_name)
