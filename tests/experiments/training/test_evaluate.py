"""Finished runs, loaded and evaluated in other ways than they were trained in."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import raises_for
from safetensors.torch import save_file
from support.runs import same, tiny, weights
from support.toy import Curve, curve

from comrope.experiments.common.errors import UserError
from comrope.experiments.runs.directory import RESULT, read_result, reseal
from comrope.experiments.training.evaluate import evaluate_run, load_run
from comrope.experiments.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("run") / "digits"
    train(tiny(train__epochs=1, evaluate__resolutions=(12, 24)), folder, progress=False)
    return folder


def test_a_run_is_loaded_with_its_weights(run):
    config, model = load_run(run)
    assert config == tiny(train__epochs=1, evaluate__resolutions=(12, 24))
    assert same(model.state_dict(), weights(run))
    assert not model.training


def test_by_default_it_is_evaluated_as_it_was_trained(run):
    found = evaluate_run(run, progress=False)
    assert [entry["view"] for entry in found] == ["12", "24"]
    assert {e["view"]: e["top1"] for e in found} == read_result(run)["top1"]
    (part,) = evaluate_run(run, only=["24"], progress=False)
    assert part == found[1]


def test_an_offset_is_shared_by_all_tokens_of_an_image(run):
    found = evaluate_run(run, resolutions=[12, 36], offsets=(0.0, 2.0), progress=False)
    assert [(e["resolution"], e["offset"]) for e in found] == [(12, 0), (12, 2), (36, 0), (36, 2)]
    assert found[1]["top1"] == pytest.approx(found[0]["top1"], abs=0.3)  # the method is relative
    assert found[2]["top1"] < found[0]["top1"]


def test_how_images_are_put_into_batches_changes_nothing(run):
    options = {"offsets": (1.0,), "resolutions": [12], "progress": False}
    found = [
        evaluate_run(run, overrides={"evaluate.batch_size": size}, **options) for size in (7, 512)
    ]
    assert found[0] == found[1]


def test_what_the_weights_are_of_cannot_be_changed(run, tmp_path):
    for override, argument in {
        "model.block_size=4": "model",
        "task=support.toy:Curve": "task",
    }.items():
        with raises_for(argument, UserError):
            evaluate_run(run, overrides=[override], progress=False)
    with raises_for("evaluate.resolutions", UserError):
        evaluate_run(run, resolutions=[13], progress=False)
    with raises_for("run", UserError):
        evaluate_run(tmp_path / "nowhere", progress=False)


def test_a_task_without_resolutions_or_coordinates_says_so(tmp_path):
    train(curve(), tmp_path / "run", progress=False)
    (found,) = evaluate_run(tmp_path / "run", progress=False)
    assert found["view"] == "all"
    assert found["error"] == read_result(tmp_path / "run")["error"]["all"]
    for options in ({"resolutions": [12]}, {"offsets": (0.5,)}):
        with raises_for(*options, UserError):
            evaluate_run(tmp_path / "run", progress=False, **options)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_headline_that_is_not_finite_is_refused_in_its_view(value, tmp_path, monkeypatch):
    entry = {"error": value, "points": 9, "unreadable": 0}
    monkeypatch.setattr(Curve, "evaluate", lambda *_, **options: entry)
    with pytest.raises(UserError, match=r"all: .*finite error"):
        train(curve(), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / RESULT).exists()


def test_weights_of_another_shape_are_named(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "run")
    tensors = {**weights(run), "head.weight": torch.zeros(3, 64)}
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors has changed"):
        load_run(other)
    reseal(other)
    with pytest.raises(UserError, match=r"model\.safetensors .*head\.weight.*\(3, 64\)"):
        load_run(other)
