"""A model small enough to be saved, spoilt and loaded many times."""

from __future__ import annotations

import torch

from comrope.models import ViT, create_model


def nano(**options) -> ViT:
    options = {"in_chans": 1, "num_classes": 10, "depth": 2, **options}
    model = create_model("vit_nano_patch2_12", **options).eval()
    with torch.no_grad():  # nothing that a fresh start would come to by itself
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
