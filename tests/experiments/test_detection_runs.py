"""Detectors through the training that classifiers have: stopped, resumed, shared out, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.runs import same, weights

from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data import scenes
from comrope.experiments.data.coco import METRICS
from comrope.experiments.export import export
from comrope.experiments.inspect import inspect_run
from comrope.experiments.runs.directory import read_result
from comrope.experiments.runs.log import read_log
from comrope.experiments.training import trainer
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.train import is_finished, train

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = {
    "train.start_from": None,
    "train.epochs": 1,
    "train.batch_size": 16,
    "train.log_every": 1,
    "evaluate.every": 1,
}


def short(**fields):
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return load_recipe("scenes").with_overrides({**SHORT, **named})


@pytest.fixture
def few(monkeypatch):
    """Scenes, for what need not be learned."""
    monkeypatch.setattr(scenes, "SCENES", {"train": 64, "val": 16})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("detector") / "run"
    train(short(), folder, progress=False)
    return folder


def test_a_run_says_what_it_learned(whole):
    result = read_result(whole)
    assert set(result["AP"]) == set(result["figures"]) == {"48"}
    assert set(result["figures"]["48"]) == set(METRICS)
    assert result["images"] == 96
    assert result["steps"] == 32
    assert is_finished(short(), whole)
    records = [r["loss"] for r in read_log(whole / "log.jsonl") if r["event"] == "train"]
    assert records[-1] < records[0]


def test_stopped_and_resumed_it_ends_with_the_same_weights(few, tmp_path, monkeypatch):
    train(short(), tmp_path / "whole", progress=False)
    steps = iter([False, True])
    with monkeypatch.context() as stopping:
        stopping.setattr(trainer.Run, "should_stop", lambda self: next(steps))
        with pytest.raises(Interrupted):
            train(short(), tmp_path / "run", progress=False)
    train(short(), tmp_path / "run", progress=False)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    train(short(train__seed=1), tmp_path / "other", progress=False)
    assert not same(weights(tmp_path / "other"), weights(tmp_path / "whole"))


@pytest.fixture
def outlined(tmp_path):
    """A few scenes as files in COCO's format, each digit with the outline of its box."""
    for split, train_them in (("train", True), ("val", False)):
        source = scenes.Scenes(train=train_them)
        (tmp_path / split).mkdir()
        tree = {**source.truth, "images": source.truth["images"][:8]}
        tree["annotations"] = [a for a in tree["annotations"] if a["image_id"] < 8]
        for annotation in tree["annotations"]:
            x, y, w, h = annotation["bbox"]
            annotation["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        for image in tree["images"]:
            image["file_name"] = f"{image['id']}.png"
            source.load(image["id"])[0].save(tmp_path / split / image["file_name"])
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
    return tmp_path


def test_masks_are_learned_and_evaluated_by_the_same_loop(outlined, tmp_path):
    settings = short(
        data__name="coco", data__root=str(outlined), data__val_split="val", detect__kind="mask",
        train__batch_size=4, data__workers=1, train__ema=0.5, train__accumulate=2,
        model__drop_path_rate=0.1,
    )  # fmt: skip
    result = train(settings, tmp_path / "run", progress=False)
    assert set(result["figures"]["48"]) == {*METRICS, "masks"}
    assert set(result["figures"]["48"]["masks"]) == set(METRICS)
    assert result["images"] == 8


def test_figures_of_every_epoch_are_told(few, tmp_path):
    train(short(train__epochs=3, train__batch_size=64), tmp_path / "run", progress=False)
    told = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "evaluation"]
    assert [record["epoch"] for record in told] == [1, 2]
    assert set(METRICS) <= set(told[0])


def test_seen_at_another_size(whole):
    found = evaluate_run(whole, resolutions=(48, 64), progress=False)
    assert [entry["view"] for entry in found] == ["48", "64"]
    assert found[0]["AP"] == pytest.approx(read_result(whole)["AP"]["48"])
    more = train(short(evaluate__resolutions=(64,)), whole, progress=False)
    assert set(more["AP"]) == set(more["figures"]) == {"48", "64"}
    with pytest.raises(UserError, match=r"offsets: the coordinates of a detector"):
        evaluate_run(whole, offsets=(1.0,), progress=False)


def test_the_backbone_can_be_looked_at_and_a_detector_is_not_exported(whole, tmp_path):
    facts = inspect_run(whole, tmp_path / "pictures")
    assert len(facts["layers"]) == 3
    assert all(layer["moved"] > 0 for layer in facts["layers"])
    with pytest.raises(UserError, match=r"expected a ViT of comrope, .* has a detector"):
        export(whole, "onnx", tmp_path / "model.onnx")


def test_two_processes_find_what_one_finds(whole, tmp_path):
    def evaluated(*launcher):
        file = tmp_path / f"{len(launcher)}.json"
        command = [sys.executable, *launcher, "-m", "comrope", "eval", str(whole), "--quiet"]
        done = subprocess.run(
            [*command, "--resolutions", "48", "--out", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(file.read_text())[0], done.stdout

    alone, said = evaluated()
    both, _ = evaluated("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert "AP50" in said
    for name in (*METRICS, "images"):
        assert both[name] == (None if alone[name] is None else pytest.approx(alone[name], abs=1e-6))
    assert alone["AP"] > 0
