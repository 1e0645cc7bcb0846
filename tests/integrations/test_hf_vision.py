"""Learned rotations in Hugging Face's vision models with absolute positions."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from helpers import relative_error
from support.vision_models import build, clip, images, seen

import comrope


def test_the_text_model_is_left_alone():
    torch.manual_seed(0)
    model = clip().eval()
    words = torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    ask = {"input_ids": words, "pixel_values": images()}
    with torch.no_grad():
        before = model(**ask).logits_per_image
        comrope.swap(model, "comrope-torus", ape="keep")
        names = [n for n in dict(model.named_modules()) if n.endswith(".comrope")]
        assert names
        assert all(name.startswith("vision_model.") for name in names)
        assert relative_error(model(**ask).logits_per_image, before) < 1e-5


def test_text_positions_stay_under_any_name():
    """Wrapped by PEFT, all names have a prefix."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    model = comrope.swap(peft.get_peft_model(clip(), lora), ape="drop")
    positions = {n: p for n, p in model.named_parameters() if "position_embedding" in n}
    assert {bool(p.any()) for n, p in positions.items() if "text_model" in n} == {True}
    assert {bool(p.any()) for n, p in positions.items() if "vision_model" in n} == {False}


def test_attention_by_another_name():
    model = comrope.swap(build("vit"), "comrope-ld", init="normal")
    expected = seen(model)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(seen(model), expected, rtol=1e-4, atol=1e-5)


def test_a_shallow_copy_of_a_deleted_layer_raises():
    model = comrope.swap(build("vit"))
    kept = copy.copy(next(m for m in model.modules() if "forward" in vars(m)))
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=r"copy.deepcopy, not copy.copy"):
        kept(torch.zeros(1, 4, 32))
