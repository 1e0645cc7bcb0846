"""Positions of the tokens of vision models."""

from __future__ import annotations

import pytest
import torch
from helpers import checkpoint_gradients, raises_for, relative_error
from support.vision_models import build, images, outputs, seen
from torch import nn

import comrope


def test_positions_are_perturbed_in_training_only():
    model = comrope.swap(build("timm vit"), "comrope-ld", init="normal", perturbation=1.0)
    assert torch.equal(seen(model), seen(model))
    model.train()
    assert relative_error(seen(model), seen(model)) > 1e-4


def test_perturbation_of_images_that_differ_in_size_is_refused():
    model = comrope.swap(build("timm naflex"), perturbation=1.0)
    batch = {
        "patches": torch.randn(1, 4, 192),
        "patch_coord": torch.cartesian_prod(torch.arange(2), torch.arange(2))[None],
        "patch_valid": torch.ones(1, 4, dtype=torch.bool),
    }
    seen(model, batch)
    with raises_for("perturbation"):
        model.train()(batch)


def test_without_absolute_positions_only_rotations_tell_positions_apart():
    """A ViT without class token, its patches shuffled: nothing changes while angles are zero."""
    model = build("timm vit, no class token")
    comrope.swap(model, "comrope-ld", ape="drop")
    x = images()
    shuffled = torch.cat((x[..., 8:], x[..., :8]), dim=-1)
    assert relative_error(seen(model, shuffled), seen(model, x)) < 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".comrope." in name:
                parameter.normal_()
    assert relative_error(seen(model, shuffled), seen(model, x)) > 1e-4


def test_an_unknown_number_of_tokens():
    model = comrope.swap(build("timm vit"))
    model.cls_token = nn.Parameter(torch.zeros(1, 3, 64))
    model.no_embed_class, model.pos_embed = True, nn.Parameter(model.pos_embed.data[:, 1:])
    with raises_for("tokens"):
        model(images())


@pytest.mark.parametrize("family", ["timm vit", "vit"])
def test_a_forward_pass_cannot_be_repeated_at_positions_that_are_gone(family):
    model = comrope.swap(build(family), "comrope-ld", init="normal", perturbation=1.0).train()
    checkpoint_gradients(model)
    for _ in range(2):
        outputs(model).sum().backward()
        seen(model)  # an evaluation in between is allowed
    both = outputs(model).sum() + outputs(model).sum()
    with pytest.raises(RuntimeError, match="gradient checkpointing: "):
        both.backward()


@pytest.mark.parametrize("family", ["timm vit", "vit"])
def test_gradient_checkpointing(family):
    model = comrope.swap(build(family), "comrope-ld", init="normal").train()
    outputs(model).square().mean().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    checkpoint_gradients(model)
    outputs(model).square().mean().backward()
    for name, value in expected.items():
        assert relative_error(dict(model.named_parameters())[name].grad, value) < 1e-4, name
