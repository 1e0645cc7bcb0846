"""The ViT on three axes: clips."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for

import comrope
from comrope.models import create_model

TIMELESS = (0, 1, 1)


def nano(position="comrope-ld", **options):
    sizes = {"img_size": (6, 8, 8), "patch_size": (1, 4, 4), "in_chans": 1, "num_classes": 5}
    model = create_model("vit_nanovideo_patch4_8", position=position, **{**sizes, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def change(model, x, other):
    before, after = model(x), model(other)
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize("position", ["ape", "rope", "rope-mixed", "liere", "comrope-ap"])
def test_without_time_the_frames_may_be_shuffled(position):
    x = torch.randn(2, 1, 6, 8, 8)
    shuffled = x[:, :, torch.randperm(6)]
    assert change(nano(position, axis_scale=TIMELESS), x, shuffled) < 1e-4
    assert change(nano(position), x, shuffled) > 1e-3


def test_the_scale_of_an_axis_is_that_of_its_coordinates():
    x, positions = torch.randn(1, 1, 6, 8, 8), comrope.grid((6, 2, 2))
    torch.manual_seed(0)
    plain = nano("comrope-torus")
    torch.manual_seed(0)
    scaled = nano("comrope-torus", axis_scale=(3, 1, 0.5))
    # The class token is at the centre of the canvas, which is scaled with it.
    everything = comrope.with_class_token(positions) * torch.tensor([3, 1, 0.5])
    torch.testing.assert_close(scaled(x), plain(x, everything))
    torch.testing.assert_close(scaled(x, positions), plain(x, everything))
    assert plain.axis_scale is None
    assert nano("none", axis_scale=0).axis_scale == (0, 0, 0)


@pytest.mark.parametrize("tubelet", [1, 2, 3])
def test_tubelets_and_any_number_of_frames(tubelet):
    model = nano(patch_size=(tubelet, 4, 4))
    for frames in (tubelet, 6, 4 * tubelet):
        assert model(torch.randn(1, 1, frames, 12, 8)).shape == (1, 5)
    if tubelet > 1:
        with raises_for("x"):
            model(torch.randn(1, 1, tubelet + 1, 8, 8))


@pytest.mark.parametrize(
    ("scale", "message"), [((1, 1), "axis_scale: expected one number or 3, got 2"), ("x", "axis_s")]
)
def test_scales_that_do_not_fit(scale, message):
    with pytest.raises(ValueError, match=message):
        nano(axis_scale=scale)


@pytest.mark.parametrize("scale", [TIMELESS, 2.0, 0])
def test_saved_with_its_scale(scale, tmp_path):
    model = nano(axis_scale=scale)
    model.save_pretrained(tmp_path)
    again = comrope.models.ViT.from_pretrained(tmp_path).eval()
    x = torch.randn(1, 1, 6, 8, 8)
    assert torch.equal(again(x), model(x))
