"""The groups of parameters of an optimizer, and its schedule."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import raises_for
from support.runs import tiny
from torch import nn

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.tasks import task_of
from comrope.experiments.training.optim import (
    create_optimizer,
    create_schedule,
    parameter_groups,
    try_optimizer,
)


def by_name(config) -> dict[str, tuple[float, float]]:
    """Scale of the rate, and weight decay, of every parameter."""
    task = task_of(config)
    model = task.build_model()
    groups = parameter_groups(config.optim, model, task.layer_of)
    found = {
        id(p): (group["lr_scale"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }
    names = dict(model.named_parameters())
    assert len(found) == len(names)
    return {name: found[id(p)] for name, p in names.items()}


@pytest.mark.parametrize("method", ["comrope-torus", "comrope-ld"])
def test_angles_have_a_rate_of_their_own_and_do_not_decay(method):
    found = by_name(tiny(model__position=method, optim__angle_lr_scale=4.0))
    angles = {name for name in found if ".rope." in name}
    assert angles
    assert {found[name] for name in angles} == {(4.0, 0.0)}
    assert found["blocks.0.mlp.fc1.weight"] == (1.0, 0.05)
    assert found["blocks.0.mlp.fc1.bias"] == (1.0, 0.0)
    assert {scale for name, (scale, _) in found.items() if name not in angles} == {1.0}


def test_the_rate_falls_from_layer_to_layer_downwards():
    found = by_name(tiny(optim__layer_decay=0.5, optim__angle_lr_scale=3.0))
    assert {name: found[name][0] for name in (
        "patches.proj.weight", "cls_token", "blocks.0.mlp.fc1.weight", "blocks.2.mlp.fc1.weight",
        "blocks.2.attn.rope.method.theta", "norm.weight", "head.weight",
    )} == {
        "patches.proj.weight": 1 / 16, "cls_token": 1 / 16, "blocks.0.mlp.fc1.weight": 1 / 8,
        "blocks.2.mlp.fc1.weight": 1 / 2, "blocks.2.attn.rope.method.theta": 3 / 2,
        "norm.weight": 1, "head.weight": 1,
    }  # fmt: skip


def test_the_layers_of_a_detector_are_those_of_its_vit():
    recipe = load_recipe("scenes").with_overrides(
        {"optim.layer_decay": 0.5, "optim.weight_decay": 0.1, "optim.angle_lr_scale": 3.0}
    )
    found, vit = by_name(recipe), "backbone.plain.vit"
    assert found[f"{vit}.patches.proj.weight"][0] == 1 / 16
    assert found[f"{vit}.blocks.0.mlp.fc1.weight"] == (1 / 8, 0.1)
    assert found[f"{vit}.blocks.2.attn.rope.method.P"] == (3 / 2, 0.0)
    for name in ("roi_heads.box_predictor.cls_score.weight", "backbone.pyramid.levels.1.0.weight"):
        assert found[name] == (1, 0.1)


def test_the_rate_rises_and_falls_with_the_step():
    config = tiny(train__epochs=10, optim__warmup_ratio=0.2, optim__lr=1.0, optim__min_lr=0.1)
    model = nn.Linear(1, 1)
    optimizer = create_optimizer(config.optim, model, lambda name: None)
    schedule = create_schedule(config, optimizer, steps_per_epoch=10)

    def rate(step: int) -> float:
        schedule.step_update(step)
        return optimizer.param_groups[0]["lr"]

    assert rate(0) == pytest.approx(1 / 21)  # the first step counts
    assert rate(10) == pytest.approx(0.5, abs=0.05)
    assert rate(20) > 0.9
    assert rate(60) == pytest.approx(0.4, abs=0.15)
    assert rate(99) == pytest.approx(0.1, abs=0.01)
    assert rate(10) == pytest.approx(0.5, abs=0.05)  # a function of the step alone


@pytest.mark.parametrize("name", ["adamx", "sgdr"])
def test_optimizers_that_timm_does_not_have_are_refused(name):
    with raises_for("optim.name", UserError):
        create_optimizer(tiny(optim__name=name).optim, nn.Linear(1, 1), lambda name: None)


@pytest.mark.parametrize("name", ["adamx", "adan", "adahessian"])
def test_optimizers_that_cannot_be_used_are_refused_before_training(name):
    """Unknown; three betas; a second derivative."""
    with raises_for("optim.name", UserError):
        try_optimizer(tiny(optim__name=name), torch.device("cpu"))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion", "muon", "lookahead_adamw"])
def test_a_trial_changes_no_generator(name):
    states = random.getstate(), torch.get_rng_state()
    try_optimizer(tiny(optim__name=name), torch.device("cpu"))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
