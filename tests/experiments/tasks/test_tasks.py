"""Which task a configuration has, and a task from outside of the package."""

from __future__ import annotations

import json

import pytest
from helpers import raises_for
from support.toy import Curve, curve

from comrope.experiments.cli import app
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.tasks import TASKS, task_of


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("digits", "images"), ("imagenet", "images"), ("moving", "clips"), ("scenes", "detection")],
)
def test_the_data_imply_a_task_and_a_recipe_may_name_it(recipe, name):
    config = load_recipe(recipe)
    assert task_of(config).name == name
    assert type(task_of(config.with_overrides({"task": name}))) is type(task_of(config))
    assert name in TASKS


def test_a_task_may_be_anywhere():
    assert isinstance(task_of(curve()), Curve)


@pytest.mark.parametrize(
    "name",
    [
        "image",
        "no.such.module:Task",
        "support.toy:None",
        "support.toy:Points",
        "json:dumps",
        ":x",
        ".toy:Curve",
        "a\nb",
        "x:" + "y" * 9999,
    ],
)
def test_anything_else_is_refused(name):
    with raises_for("task", UserError):
        task_of(load_recipe("digits").with_overrides({"task": name}))


def test_it_is_trained_and_evaluated_by_the_commands(tmp_path, capsys):
    recipe = tmp_path / "curve.yaml"
    recipe.write_text("base: digits\ntask: support.toy:Curve\ntrain: {epochs: 2, batch_size: 8}\n")
    command = ["train", str(recipe), "optim.lr=0.05", "--out", str(tmp_path / "run"), "--quiet"]
    app(command, standalone_mode=False)
    said = capsys.readouterr().out
    error = json.loads((tmp_path / "run" / "result.json").read_text())["error"]["all"]
    assert f"{error:.2f} ‰" in said
    command = ["eval", str(tmp_path / "run"), "--out", str(tmp_path / "found.json"), "--quiet"]
    app(command, standalone_mode=False)
    assert f"{error:.2f} ‰" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert (found["view"], found["error"]) == ("all", error)
