"""Fields that do not go together are named."""

from __future__ import annotations

import pytest
from helpers import raises_for
from support.runs import tiny

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.tasks import task_of


@pytest.mark.parametrize(
    ("recipe", "fields", "argument"),
    [
        # every task
        ("digits", {"model.name": "resnet50"}, "model.name"),
        ("digits", {"model.name": "vit_nano_patch5_12"}, "model.name"),
        ("digits", {"data.mean": (0.5, 0.5, 0.5)}, "data.mean"),
        ("moving", {"data.std": ()}, "data.mean"),
        ("scenes", {"model.axis_scale": (1, 1, 1)}, "model.axis_scale"),
        ("digits", {"model.axis_scale": (1,)}, "model.axis_scale"),
        ("digits", {"train.perturbation_axes": (2,)}, "train.perturbation_axes"),
        # images
        ("digits", {"evaluate.resolutions": ()}, "evaluate.resolutions"),
        ("digits", {"data.holdout": 1}, "data.holdout"),
        ("digits", {"augment.auto_augment": "rand-mx"}, "augment.auto_augment"),
        ("digits", {"augment.auto_augment": "rand-n9999"}, "augment.auto_augment"),
        ("digits", {"data.frames": 4}, "data.frames"),
        ("digits", {"evaluate.frames": (4,)}, "data.frames"),
        ("digits", {"model.tubelet": 2}, "data.frames"),
        # clips
        ("moving", {"data.frames": 0}, "data.frames"),
        ("moving", {"data.holdout": 0.2}, "data.holdout"),
        ("moving", {"model.tubelet": 5}, "model.tubelet"),
        ("moving", {"augment.cutmix": 1.0}, "augment.cutmix"),
        ("moving", {"augment.erase": 0.2}, "augment.erase"),
        ("moving", {"model.axis_scale": (1, 1)}, "model.axis_scale"),
        ("moving", {"train.perturbation_axes": (3,)}, "train.perturbation_axes"),
        ("moving", {"evaluate.spans": (1.5,)}, "evaluate.spans"),
        ("moving", {"model.name": "timm:test_vit"}, "data.frames"),
        # detection
        ("scenes", {"data.frames": 4}, "data.frames"),
        ("scenes", {"model.name": "timm:test_vit"}, "model.name"),
        ("scenes", {"train.perturbation": 1.0}, "train.perturbation"),
        ("scenes", {"train.strategy": "fsdp2"}, "train.strategy"),
        ("scenes", {"augment.mixup": 0.5}, "augment.mixup"),
        ("scenes", {"data.holdout": 0.2}, "data.holdout"),
        ("scenes", {"data.cache": True}, "data.cache"),
        ("scenes", {"detect.jitter": (2.0, 1.0)}, "detect.jitter"),
        ("scenes", {"detect.anchors": (8, 16)}, "detect.anchors"),
    ],
)
def test_fields_that_do_not_suit_the_task_are_named(recipe, fields, argument):
    config = load_recipe(recipe)
    task_of(config)
    with raises_for(argument, UserError):
        task_of(config.with_overrides(fields))


def test_fields_at_their_limits_are_accepted():
    for fields in (
        {"data__holdout": 0.99},
        {"augment__auto_augment": "rand-m9-n3-mstd0.5-tweights"},
        {"augment__auto_augment": ""},
        {"model__axis_scale": (0.0, 2.0), "train__perturbation_axes": (0, 1)},
    ):
        task_of(tiny(**fields))
