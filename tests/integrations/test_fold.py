"""Folded models: plain RoPE, the same outputs."""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, raises_for, relative_error
from support import language_models as language
from support import vision_models as vision
from torch import nn

import comrope
from comrope.analysis import rotary_modules
from comrope.models import ViT


def perturbed(model: nn.Module, sharper: float = 1.0) -> nn.Module:
    """As after some training: angles and biases that matter, scores that are not all alike."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".comrope." in name or ".rope." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif any(word in name for word in vision.PROJECTIONS):
                parameter.mul_(sharper)
    return model


@pytest.mark.parametrize("family", language.FAMILIES)
def test_language_models(family):
    model = comrope.swap(language.build(family), "comrope-ld", block_size=4)
    before = language.logits(perturbed(model, sharper=20.0))
    assert comrope.fold(model) is model
    assert relative_error(language.logits(model), before) < 1e-4
    kept = {"qwen3": "folded"}.get(family, "rope-mixed")
    assert {rope.name for rope in rotary_modules(model).values()} == {kept}


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_vision_models(family):
    model = comrope.swap(vision.build(family), "comrope-torus", block_size=4)
    before = vision.seen(perturbed(model))
    comrope.fold(model)
    assert relative_error(vision.seen(model), before) < 1e-4
    left = rotary_modules(model)
    assert bool(left) == (family not in vision.MIXED)


@pytest.mark.parametrize("method", COMMUTING)
def test_every_method_and_our_own_model(method, tmp_path):
    torch.manual_seed(0)
    model = comrope.create_model("vit_nano_patch8_32", position=method, num_classes=5).eval()
    perturbed(model, sharper=5.0)
    before = vision.seen(model)
    unlike = vision.seen(model, vision.images().flip(-1))
    assert relative_error(unlike, before) > 1e-2
    comrope.fold(model)
    assert relative_error(vision.seen(model), before) < 1e-4
    assert relative_error(vision.seen(model, vision.images().flip(-1)), unlike) < 1e-4
    model.save_pretrained(tmp_path)
    assert torch.equal(vision.seen(type(model).from_pretrained(tmp_path)), vision.seen(model))


def test_in_float64_outputs_stay_to_rounding(commuting):
    model = perturbed(ViT(img_size=16, patch_size=4, position=commuting, embed_dim=32, depth=2,
                        num_heads=2, rotate_values=True).double())  # fmt: skip
    x = torch.randn(1, 3, 16, 24, dtype=torch.float64)
    expected = model(x)
    assert relative_error(comrope.fold(model)(x), expected) < 1e-12


def test_a_folded_model_of_timm_is_a_model_of_timm():
    model = comrope.swap(vision.build("timm mixed"), "comrope-torus", block_size=8)
    names = set(vision.build("timm mixed").state_dict())
    vision.train(model)
    before = vision.seen(model)
    comrope.fold(model)
    assert set(model.state_dict()) == names
    assert not any(hooks for part in model.modules() for hooks in (part._forward_hooks,))
    assert model.rope.freqs.requires_grad
    other = vision.build("timm mixed")
    other.load_state_dict(model.state_dict())
    assert relative_error(vision.seen(other), before) < 1e-4


def test_a_folded_model_goes_on_learning_and_generating():
    model = comrope.swap(language.build("llama"), "comrope-ld", block_size=4)
    language.train(model, steps=3)
    options = {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(language.tokens(), **options)
    comrope.fold(model)
    assert torch.equal(model.generate(language.tokens(), **options), before)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if "comrope" in n}
    language.train(model, steps=3)
    assert all((dict(model.named_parameters())[n] - p).abs().max() > 1e-4 for n, p in start.items())


def test_dropped_positions_stay_dropped():
    model = comrope.swap(vision.build("timm mixed"), "comrope-torus", ape="drop")
    before = vision.seen(perturbed(model))
    comrope.fold(model)
    assert relative_error(vision.seen(model), before) < 1e-4
    assert not model.pos_embed.any()


def test_layers_that_are_not_known_are_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96)
            self.rope = comrope.RotaryEmbedding("comrope-ld", num_heads=2, head_dim=16)

    with raises_for("model", naming="Own"):
        comrope.fold(Own())
    model = comrope.swap(language.build("llama"), "comrope-ld")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj = first.q_proj
    with raises_for("model", naming="every layer"):
        comrope.fold(model)
    second.q_proj = second.k_proj
    first.k_proj = first.q_proj
    with raises_for("model", naming="queries and keys"):
        comrope.fold(model)


def test_there_is_no_way_back():
    model = comrope.fold(comrope.swap(vision.build("timm vit"), "comrope-ld"))
    with raises_for("model", naming="folded"):
        comrope.unswap(model)
    before = vision.seen(model)
    assert relative_error(vision.seen(comrope.fold(model)), before) < 1e-5


def test_what_cannot_be_folded_is_left_as_it_was():
    with raises_for("model", naming="Linear"):
        comrope.fold(nn.Linear(2, 2))
    model = comrope.swap(vision.build("timm vit"), "liere")
    before = vision.seen(perturbed(model))
    with raises_for("model", naming="liere"):
        comrope.fold(model)
    assert torch.equal(vision.seen(model), before)
    model = comrope.swap(language.build("llama"), "comrope-ld")

    class Adapter(nn.Linear):
        pass

    model.model.layers[1].self_attn.q_proj = Adapter(64, 64, bias=False)
    before = language.logits(perturbed(model, sharper=20.0))
    with raises_for("model", naming="Adapter"):
        comrope.fold(model)
    assert torch.equal(language.logits(model), before)


def test_a_model_that_started_wide_is_saved_after_folding(tmp_path):
    model = ViT(
        img_size=8, patch_size=4, position="comrope-torus", embed_dim=32, depth=1, num_heads=2,
        spread=2.0,
    ).eval()  # fmt: skip
    images = torch.rand(1, 3, 8, 8)
    wanted = model(images)
    comrope.fold(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(ViT.from_pretrained(tmp_path).eval()(images), wanted)


def test_another_order_of_channels_is_not_put_into_timms_rotation():
    model = comrope.swap(
        vision.build("timm mixed"), "rope-mixed", channel_order="half", block_size=4
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    before = vision.seen(model)
    assert relative_error(vision.seen(comrope.fold(model)), before) < 1e-4


def test_what_was_frozen_stays_frozen():
    model = comrope.swap(vision.build("timm vit"), "comrope-ld").requires_grad_(False)
    comrope.fold(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
