"""Parameter groups: weight decay for weights only, a learning rate for angles."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for
from torch import nn

import comrope
from comrope.analysis import rotary_modules


def ours():
    return comrope.create_model("vit_nano_patch4_12", position="comrope-ld", ape=True)


def swapped_timm():
    timm = pytest.importorskip("timm")
    return comrope.swap(timm.create_model("test_vit"), "comrope-torus")


def swapped_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=16,
    )  # fmt: skip
    return comrope.swap(transformers.LlamaForCausalLM(config), "comrope-ld")


class Wrapped(nn.Module):
    """Somebody's own model around ours: what it spares is named from within."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = ours(), nn.Linear(1000, 3)


NOT_DECAYED = {
    ours: {"cls_token", "ape.codebook"},
    swapped_timm: {"cls_token", "pos_embed"},
    swapped_llama: set(),
    Wrapped: {"body.cls_token", "body.ape.codebook"},
}


@pytest.mark.parametrize("make", NOT_DECAYED)
def test_every_parameter_is_in_the_group_where_it_belongs(make):
    model = make()
    groups = comrope.parameter_groups(model, weight_decay=0.05, lr=1e-4, angle_lr=1e-3)
    settings = {
        id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]
    }
    assert len(settings) == sum(len(group["params"]) for group in groups)
    angles = {id(p) for rope in rotary_modules(model).values() for p in rope.parameters()}
    assert angles
    for name, parameter in model.named_parameters():
        if id(parameter) in angles:
            expected = (1e-3, 0.0)
        elif parameter.ndim <= 1 or name in NOT_DECAYED[make]:
            expected = (1e-4, 0.0)
        else:
            expected = (1e-4, 0.05)
        assert settings.pop(id(parameter)) == expected, name
    assert not settings
    assert NOT_DECAYED[make] <= {name for name, _ in model.named_parameters()}


def test_an_optimizer_takes_them():
    """By SGD, whose step is rate times gradient and decay."""
    model = ours()
    model(torch.randn(2, 3, 12, 12)).square().sum().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = comrope.parameter_groups(model, weight_decay=0.5, lr=0.25, angle_lr=2.0)
    torch.optim.SGD(groups, lr=100.0).step()
    after = dict(model.named_parameters())
    for name, lr, decay in (
        ("blocks.0.attn.rope.method.P", 2.0, 0.0),
        ("blocks.0.attn.qkv.weight", 0.25, 0.5),
        ("blocks.0.norm1.weight", 0.25, 0.0),
        ("ape.codebook", 0.25, 0.0),
    ):
        expected = before[name] - lr * (after[name].grad + decay * before[name])
        torch.testing.assert_close(after[name].detach(), expected)


def test_rates_that_are_not_given_are_the_optimizers_own():
    groups = comrope.parameter_groups(ours(), weight_decay=0.0)
    assert all("lr" not in group for group in groups)
    assert {g["lr"] for g in comrope.parameter_groups(ours(), weight_decay=0.0, lr=1.0)} == {1.0}
    *others, angles = comrope.parameter_groups(ours(), weight_decay=0.0, angle_lr=1.0)
    assert angles["lr"] == 1.0
    assert all("lr" not in group for group in others)


def test_frozen_parameters_are_left_out_and_empty_groups_too():
    model = ours()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".rope." in name)
    (angles,) = comrope.parameter_groups(model, weight_decay=0.1, lr=1e-4, angle_lr=1e-3)
    assert (angles["lr"], angles["weight_decay"], len(angles["params"])) == (1e-3, 0.0, 6)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"angle_lr": float("nan")}])
def test_rates_are_checked(wrong):
    (name,) = wrong
    with raises_for(name):
        comrope.parameter_groups(ours(), weight_decay=0.1, **wrong)
