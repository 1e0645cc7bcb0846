"""A complete configuration: overrides as typed, and values that contradict each other."""

from __future__ import annotations

import pytest
from helpers import raises_for

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, read_numbers


def test_overrides_are_typed():
    config = Config().with_overrides(
        ["optim.lr=1e-4", "train.precision=no", "augment.scale=[0.5,1]", "train.ema=0.99",
         "evaluate.resolutions=224", "model.base=null"]
    )  # fmt: skip
    assert config.optim.lr == 1e-4
    assert config.train.precision == "no"
    assert config.augment.scale == (0.5, 1.0)
    assert config.train.ema == 0.99
    assert config.evaluate.resolutions == (224,)
    assert config.model.base is None


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.epoch=3", "train.epoch: .*did you mean train.epochs"),
        ("epochs=3", "epochs"),
        ("train.epochs", "train.epochs"),
        ("train.epochs=0", "train.epochs"),
        ("optim.lr=-1", "optim.lr"),
        ("train.precision=fp8", "train.precision: .*bf16"),
        ("train.accumulate=7", "train.accumulate: .*6144"),
        ("optim.min_lr=0.1", "optim.min_lr: .*0.001"),
    ],
)
def test_overrides_that_are_not_accepted(override, field):
    with pytest.raises(UserError, match=field):
        Config().with_overrides([override])


@pytest.mark.parametrize(
    ("option", "text", "numbers"),
    [
        ("--resolutions", "12", (12,)),
        ("--resolutions", "12,24", (12, 24)),
        ("--offsets", "0,0.5,1e-3", (0.0, 0.5, 1e-3)),
        ("--resolutions", "", None),
        ("--resolutions", "12,x", None),
        ("--resolutions", "100000", None),
        ("--offsets", "-1", None),
        ("--offsets", "nan", None),
    ],
)
def test_numbers_of_an_evaluation(option, text, numbers):
    if numbers is not None:
        assert read_numbers(option, text) == numbers
        return
    with raises_for(option, UserError):
        read_numbers(option, text)


def test_texts_are_taken_as_they_are_typed():
    for path in ("/data/a #b", "/data/x: y", "[1", "2024", "no"):
        assert Config().with_overrides([f"data.root={path}"]).data.root == path
    assert Config().with_overrides(["data.root=null"]).data.root is None


def test_a_task_and_its_options():
    config = Config().with_overrides(
        ["task=package.module:Class", "options.rate=1e-3", "options.size=3", "options.on=true"]
    )
    assert config.task == "package.module:Class"
    assert config.options == {"rate": 1e-3, "size": 3, "on": True}
    assert Config().options == {}
    assert len({config, Config(), Config()}) == 2
    for wrong in ("options.size=[1]", "options=3", "taks=images"):
        with pytest.raises(UserError, match=wrong.partition("=")[0]):
            config.with_overrides([wrong])
