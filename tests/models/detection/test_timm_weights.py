"""Weights of timm in our ViT."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for
from support.backbones import small, tokenless

from comrope.models.detection import load_timm_weights


def theirs(**options):
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 2}
    model = timm.models.VisionTransformer(
        **{**sizes, "mlp_ratio": 2.0, "num_classes": 7, **options}
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {}),
        ({"init_values": 0.1}, {"layer_scale": 0.1}),
        ({"no_embed_class": True}, {}),
        (
            {"class_token": False, "global_pool": "avg", "fc_norm": False},
            {"class_token": False, "global_pool": "avg"},
        ),
    ],
)
def test_the_weights_of_timm_give_the_features_of_timm(options, ours):
    model, vit, x = theirs(**options), small("ape", **ours).eval(), torch.randn(2, 3, 32, 32)
    assert load_timm_weights(vit, model.state_dict()) == ((), ())
    with torch.no_grad():
        torch.testing.assert_close(
            vit.forward_features(x), model.forward_features(x), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(vit(x), model(x), rtol=1e-5, atol=1e-5)


def test_weights_for_another_grid_another_task_and_new_angles():
    weights = theirs().state_dict()
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    own_grid, wider = small("ape").eval(), small("ape", img_size=(48, 64)).eval()
    load_timm_weights(own_grid, weights)
    load_timm_weights(wider, weights)
    x = torch.randn(1, 3, 48, 64)
    with torch.no_grad():
        torch.testing.assert_close(wider(x), own_grid(x), rtol=1e-5, atol=1e-5)
    rotary = small("comrope-ld", ape=True, init="zeros", num_classes=5)
    left_out, new = load_timm_weights(rotary, weights)
    assert left_out == ("head.weight", "head.bias")
    angles = {name for name in rotary.state_dict() if ".rope." in name}
    assert set(new) == {"head.weight", "head.bias"} | angles
    assert "pos_embed" in load_timm_weights(small("comrope-ld"), weights).left_out
    assert "cls_token" in load_timm_weights(tokenless(), weights).left_out
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights.items())


def test_weights_that_do_not_fit():
    weights = theirs().state_dict()
    with raises_for("state_dict", naming="patch_embed.proj.weight"):
        load_timm_weights(small("ape", patch_size=16), weights)
    with raises_for("state_dict", naming="pos_embed"):
        load_timm_weights(small("ape"), {**weights, "pos_embed": torch.zeros(1, 15, 48)})
    with raises_for("vit"):
        load_timm_weights(small("ape", img_size=(32,), patch_size=(8,)), weights)
