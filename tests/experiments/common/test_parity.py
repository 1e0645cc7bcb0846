"""Networks are compared with block-wise matrix exponentials."""

from __future__ import annotations

import torch

from comrope.analysis import rotary_modules
from comrope.experiments.common.parity import TOLERANCE, parity_error
from comrope.models import ViT

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2,
         "num_classes": 5}  # fmt: skip
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_a_network_without_rotations_has_no_error():
    assert parity_error(ViT(position="ape", **SIZES), IMAGES) is None


def test_the_error_is_that_of_the_backend():
    model = ViT(position="comrope-ld", **SIZES).eval()
    torch.nn.init.normal_(model.head.weight)
    with torch.no_grad():
        for rope in rotary_modules(model).values():
            rope.method.P.mul_(30)
    assert parity_error(model, IMAGES) < 1e-5 < TOLERANCE
    assert [rope.backend for rope in rotary_modules(model).values()] == ["auto", "auto"]


def test_two_results_that_differ_are_an_error():
    """Layers are dropped at random: both are computed, and not one of them twice."""
    model = ViT(position="comrope-ld", drop_path_rate=0.9, **SIZES).train()
    torch.nn.init.normal_(model.head.weight)
    assert parity_error(model, IMAGES.repeat(8, 1, 1, 1)) > TOLERANCE
