"""Models by name."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for

from comrope.models import ViT, create_model


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("resnet50", None),
        ("vit_bas_patch16_224", "vit_base_patch16_224"),
        ("vit_tiny_16_224", "vit_tiny_patch16_224"),
        (None, None),
    ],
)
def test_names_that_do_not_exist(name, suggested):
    with raises_for("name") as raised:
        create_model(name)
    assert f"did you mean {suggested!r}" in str(raised.value) or suggested is None
    assert ("did you mean" in str(raised.value)) == (suggested is not None)


def test_models_are_registered_with_timm():
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "comrope_vit_tiny_patch16_224", position="comrope-ap", num_classes=7, drop_path_rate=0.1
    )
    assert isinstance(model, ViT)
    assert model(torch.randn(1, 3, 64, 96)).shape == (1, 7)
    assert model.pretrained_cfg["input_size"] == (3, 224, 224)
    assert "comrope_vit_base_patch16_224" in timm.list_models("comrope_*")


def test_the_usual_sizes():
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in create_model(f"vit_{name}_patch16_224").parameters()) / 1e6
            for name in ("tiny", "small", "base", "large")
        }
    expected = {"tiny": 5.7, "small": 22.1, "base": 86.6, "large": 304.3}
    assert sizes == pytest.approx(expected, rel=0.02)
