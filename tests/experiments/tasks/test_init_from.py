"""Where a run starts: the weights of another, and what is kept of them."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers import FROM_ZERO, raises_for
from support.runs import (
    Memory,
    finetuned,
    in_process,
    same,
    stop_after,
    tiny,
    trainer_of,
    weights,
)
from torch import nn

import comrope
from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.inspect import angles_moved
from comrope.experiments.runs.log import read_log
from comrope.experiments.tasks import task_of
from comrope.experiments.tasks.init_from import fit_weights, load_weights
from comrope.experiments.training.evaluate import load_run
from comrope.experiments.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, one_thread) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "ape"
    config = tiny(model__position="ape", train__perturbation=0.0, train__epochs=1)
    train(config, folder, progress=False)
    return folder


def initialized(config):
    """The initial model of a run, and the report of it."""
    task = task_of(config)
    model = task.build_model()
    return model, task.initialize(model)


# Copying tensors


def test_tensors_are_copied_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    theirs = {name: torch.full_like(t, 7.0) for name, t in model.state_dict().items()}
    offered = {**theirs, "extra": torch.ones(1)}
    own = model[1].weight.detach().clone()
    report = fit_weights(
        model, offered, "there", new=["1.weight"], optional=lambda name: name == "extra"
    )
    assert (report.start, report.new, report.left_out) == ("there", ["1.weight"], ["extra"])
    assert (model[0].weight == 7).all()
    assert torch.equal(model[1].weight, own)


def test_frozen_parameters_keep_their_values():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    tensors = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    assert fit_weights(model, tensors, "there", optional=lambda name: True).left_out == ["bias"]
    assert torch.equal(model.bias, before)


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"weight": torch.ones(2, 2)}, "bias"),
        ({"weight": torch.ones(2, 2), "bias": torch.ones(3)}, r"bias.*\(3,\).*\(2,\)"),
        ({"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": torch.ones(1)}, "more"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_change_nothing(tensors, name):
    model = nn.Linear(2, 2)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    with pytest.raises(UserError, match=f"^train.start_from: there .*{name}"):
        fit_weights(model, tensors, "there")
    with pytest.raises(UserError, match=f"^there .*{name}"):
        load_weights(model, tensors, "there")
    assert same(model.state_dict(), before)


def test_at_most_three_names_are_told():
    with pytest.raises(UserError, match="and 1 more"):
        load_weights(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), {}, "there")


# Fine-tuning


@pytest.mark.parametrize("method", FROM_ZERO)
def test_the_first_step_is_the_pretrained_models_and_the_angles_have_a_gradient(method, pretrained):
    model, report = initialized(finetuned(pretrained, method))
    assert report.left_out == []
    images = torch.randn(4, 1, 12, 12)
    expected = load_run(pretrained)[1](images)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.SGD(comrope.parameter_groups(model, weight_decay=0.0, lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        for rope in rotary_modules(model).values():
            angles = dict(rope.method.named_parameters())
            sizes = {name: float(angle.grad.abs().max()) for name, angle in angles.items()}
            # Some may multiply zero at first; the rest is rounding.
            assert (max if step == 0 else min)(sizes.values()) > 1e-4, sizes
        optimizer.step()


def test_vanilla_rope_cannot_start_where_the_pretrained_model_is(pretrained):
    """The negative control."""
    model, _ = initialized(finetuned(pretrained, "rope"))
    images = torch.randn(4, 1, 12, 12)
    assert (model(images) - load_run(pretrained)[1](images)).abs().max() > 0.01


def test_new_tensors_are_reported_and_logged(pretrained, tmp_path):
    train(finetuned(pretrained), tmp_path / "run", progress=False)
    (started,) = (r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "started")
    names = [f"blocks.{i}.attn.rope.method.{p}" for i in range(3) for p in ("P", "theta")]
    assert (started["start"], started["new"]) == (str(pretrained), names)
    _, model = load_run(tmp_path / "run")  # a run of its own, without the start
    assert model.ape is not None
    assert len(rotary_modules(model)) == 3


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_that_learns_nothing_ends_where_it_started(ema, pretrained):
    trainer = trainer_of(finetuned(pretrained, optim__lr=0.0, train__ema=ema))
    trainer.initialize()
    trainer.fit()
    found = {n: t for n, t in trainer.finish().weights.items() if ".rope." not in n}
    assert same(found, weights(pretrained))


def test_angles_of_the_same_method_are_taken_and_of_another_are_not(pretrained, tmp_path):
    train(finetuned(pretrained, "comrope-ap"), tmp_path / "ap", progress=False)
    learned = weights(tmp_path / "ap")["blocks.0.attn.rope.method.P"]
    for method in ("comrope-ap", "comrope-ld"):  # both have a P of that shape
        config = finetuned(tmp_path / "ap", method)
        model, _ = initialized(config)
        if method == "comrope-ap":
            assert set(angles_moved(config, model).values()) == {0.0}
        own = model.state_dict()["blocks.0.attn.rope.method.P"]
        assert torch.equal(own, learned if method == "comrope-ap" else torch.zeros_like(own))
    with raises_for("model.rotate_values", UserError):
        initialized(finetuned(tmp_path / "ap", "comrope-ap", model__rotate_values=True))
    with raises_for("model.locality_bias", UserError):
        initialized(finetuned(pretrained, "comrope-ap", model__locality_bias=4.0))


def test_angles_of_images_are_not_those_of_clips(tmp_path):
    """Of ComRoPE-AP they would fit; the blocks of a head are of other axes then."""
    size = {"model__name": "vit_nanovideo_patch4_12", "model__position": "comrope-ap"}
    train(tiny(**size, train__epochs=1), tmp_path / "images", progress=False)
    fields = {"model.name": size["model__name"], "data.frames": 4, "evaluate.resolutions": (12,)}
    config = load_recipe("moving", "comrope-ap").with_overrides(
        {**fields, "train.start_from": str(tmp_path / "images")}
    )
    before = task_of(config).build_model().blocks[0].attn.rope.method.P
    model, report = initialized(config)
    assert torch.equal(model.blocks[0].attn.rope.method.P, before)
    assert "blocks.0.attn.rope.method.P" in report.new


def test_another_number_of_classes_gets_a_head_of_its_own(pretrained):
    config = finetuned(pretrained, data__num_classes=7)
    fresh = task_of(config).build_model().head.weight
    model, report = initialized(config)
    assert {"head.weight", "head.bias"} <= set(report.new)
    assert torch.equal(model.head.weight, fresh)


def test_absolute_positions_are_left_out_with_a_note(pretrained, tmp_path, capfd):
    train(finetuned(pretrained, model__ape=False), tmp_path / "run", progress=False)
    assert "model.ape=true" in " ".join(capfd.readouterr().err.split())
    assert "ape.codebook" not in weights(tmp_path / "run")
    # But they are not made up: nor is anything else besides angles.
    with pytest.raises(UserError, match=r"^train\.start_from: .*ape\.codebook"):
        initialized(finetuned(tmp_path / "run", "ape"))
    smaller = finetuned(tmp_path / "run", model__ape=False, model__block_size=4)
    with pytest.raises(UserError, match=r"^train\.start_from: .*blocks\.0\.attn\.rope\.method\.P"):
        initialized(smaller)


# Resuming


def kill_after(step: int, config, folder: Path) -> None:
    process = in_process(config, folder)
    while not (folder / "checkpoints" / f"step-{step:08d}" / "state.json").exists():
        assert process.is_alive()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.slow), "stopped"])
def test_resumed_after_its_start_is_gone_it_ends_with_the_same_weights(how, pretrained, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(pretrained, start)
    ema = 0.9 if how == "stopped" else None  # the average starts from there too
    config = finetuned(start, train__checkpoint_every=1, train__keep=100, train__ema=ema)
    train(config, tmp_path / "whole", progress=False)
    (kill_after if how == "killed" else stop_after)(5, config, tmp_path / "parts")
    assert not (tmp_path / "parts" / "result.json").exists()
    start.rename(tmp_path / "elsewhere")
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    with raises_for("train.start_from", UserError):
        train(config, tmp_path / "new", progress=False)


# Starts that do not fit


class Trap:
    """Whoever reads it as a pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def spoil(run: Path, how: str) -> dict[str, object]:
    """Damage a copy of the run, or ask of it what it cannot give."""
    file = run / "model.safetensors"
    if how == "no run":
        shutil.rmtree(run)
    elif how == "unfinished":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "pickle":
        file.write_bytes(pickle.dumps(Trap(run.parent / "sprung")))
    return {
        "patch": {"model.name": "vit_nano_patch2_12"},
        "size": {"model.name": "vit_tiny_patch4_12", "model.block_size": 4},
        "scale": {"model.layer_scale": 0.1},
        "timm": {"train.start_from": "timm:no_such_model"},
        "forgotten": {"train.start_from": load_recipe("digits_finetune").train.start_from},
    }.get(how, {})


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("no run", "config.yaml"),
        ("unfinished", "model.safetensors"),
        ("truncated", "model.safetensors"),
        ("pickle", "model.safetensors"),
        ("patch", r"ape\.codebook .*\(9, 64\).*\(36, 64\)|patches\.proj\.weight .*shape"),
        ("size", r"cls_token .*\(1, 1, 64\).*\(1, 1, 192\)"),
        ("scale", r"blocks\.0\.scale1\.gamma .*and 3 more"),
        ("timm", "no_such_model"),
        ("forgotten", ""),
    ],
)
def test_a_start_that_does_not_fit_is_named_in_a_line(how, named, pretrained, tmp_path):
    run = tmp_path / "start"
    shutil.copytree(pretrained, run)
    fields = spoil(run, how)
    config = finetuned(run).with_overrides(fields)
    with pytest.raises(UserError, match=rf"^train\.start_from: .*({named})") as caught:
        trainer_of(config, Memory()).initialize()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()


def test_no_run_starts_from_one_that_was_trained_on_what_it_holds_out(pretrained):
    with raises_for("data.holdout", UserError):
        initialized(finetuned(pretrained, data__holdout=0.25))
