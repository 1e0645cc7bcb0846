"""Learned rotations in existing models of timm and transformers, without changes of their code."""

from __future__ import annotations

import sys

from comrope.integrations import (
    api,
    hf_rotary,
    hf_vision,
    timm_vit,
    token_positions,
)
from comrope.integrations import (
    fold as _fold,
)
from comrope.integrations.api import swap, unswap
from comrope.integrations.fold import fold
from comrope.integrations.hf_rotary import ROTATING_MODELS
from comrope.integrations.hf_vision import VISION_MODELS
from comrope.integrations.timm_vit import TIMM_MODELS

__all__ = ["ROTATING_MODELS", "TIMM_MODELS", "VISION_MODELS", "fold", "swap", "unswap"]

# Names of modules and classes in version 0.1, which pickles of swapped models contain.
_OLD_NAMES = {
    "absolute": (hf_vision, {"Interfaces": "AttentionFunctions"}),
    "folding": (_fold, {}),
    "places": (
        token_positions,
        {"Places": "TokenPositions", "centred": "centered", "relative": "normalized"},
    ),
    "rotating": (hf_rotary, {"TokenPositions": "TextPositions"}),
    "swapping": (api, {}),
    "timm_models": (
        timm_vit,
        {
            "TurnedKeys": "RotateKeys",
            "TurnedQueries": "RotateQueries",
            "Unrotated": "WithoutRope",
            "_moved_in_training": "_augmented",
        },
    ),
}
for _module_name, (_module, _names) in _OLD_NAMES.items():
    sys.modules[f"{__name__}.{_module_name}"] = _module
    for _old, _new in _names.items():
        setattr(_module, _old, getattr(_module, _new))
