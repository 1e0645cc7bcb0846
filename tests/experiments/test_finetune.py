"""Fine-tuning: where a run starts, and what it keeps of that."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from support.runs import finetuned, in_process, same, tiny, weights

import comrope
from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import differences, load_recipe
from comrope.experiments.inspect import angles_moved, inspect_run
from comrope.experiments.runs.log import read_log
from comrope.experiments.studies import run_name
from comrope.experiments.tasks.init_from import begin_with
from comrope.experiments.training.evaluate import build_model, load_run
from comrope.experiments.training.train import train
from experiments.test_resume import stop_after

pytestmark = pytest.mark.usefixtures("one_thread")
LEARNED = [method for method in comrope.METHODS if method != "rope"]
# At a rotation by zero the others multiply what is zero: they move once these have.
MOVED_FIRST = {
    "rope-mixed": {"frequencies"}, "liere": {"P"}, "comrope-ap": {"P"}, "comrope-ld": {"P"},
    "comrope-torus": {"frequencies"},
}  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "ape"
    config = tiny(model__position="ape", train__perturbation=0.0, train__epochs=1)
    train(config, folder, progress=False)
    return folder


@pytest.mark.parametrize("method", LEARNED)
def test_the_first_step_is_the_pretrained_models_and_the_angles_have_a_gradient(method, pretrained):
    config = finetuned(pretrained, method)
    model = build_model(config)
    assert begin_with(model, config)["left_out"] == []
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
            moved = {name for name, size in sizes.items() if size > 1e-4}  # the rest is rounding
            assert moved == (MOVED_FIRST[method] if step == 0 else set(angles)), sizes
        optimizer.step()


def test_vanilla_rope_cannot_start_where_the_pretrained_model_is(pretrained):
    """The negative control."""
    config = finetuned(pretrained, "rope")
    model = build_model(config)
    begin_with(model, config)
    images = torch.randn(4, 1, 12, 12)
    assert (model(images) - load_run(pretrained)[1](images)).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pictures
def test_what_is_new_is_told_and_kept_apart(pretrained, tmp_path):
    result = train(finetuned(pretrained), tmp_path / "run", progress=False)
    assert result["steps"] == 11
    (started,) = (r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "started")
    names = [f"blocks.{i}.attn.rope.method.{p}" for i in range(3) for p in ("P", "theta")]
    assert (started["start"], started["new"]) == (str(pretrained), names)
    _, model = load_run(tmp_path / "run")  # as it ended: a run of its own, without the start
    assert model.ape is not None
    assert len(rotary_modules(model)) == 3
    facts = inspect_run(tmp_path / "run", tmp_path / "pictures")
    assert {"absolute.png", "similarity.png"} <= {Path(p).name for p in facts["pictures"]}


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_that_learns_nothing_ends_where_it_started(ema, pretrained, tmp_path):
    train(finetuned(pretrained, optim__lr=0.0, train__ema=ema), tmp_path / "run", progress=False)
    found = {name: t for name, t in weights(tmp_path / "run").items() if ".rope." not in name}
    assert same(found, weights(pretrained))


def test_angles_of_the_same_method_are_taken_and_of_another_are_not(pretrained, tmp_path):
    train(finetuned(pretrained, "comrope-ap"), tmp_path / "ap", progress=False)
    learned = weights(tmp_path / "ap")
    for method in ("comrope-ap", "comrope-ld"):  # both have a P of that shape
        config = finetuned(tmp_path / "ap", method)
        model = build_model(config)
        begin_with(model, config)
        if method == "comrope-ap":
            assert set(angles_moved(config, model).values()) == {0.0}
        own = model.state_dict()["blocks.0.attn.rope.method.P"]
        expected = learned["blocks.0.attn.rope.method.P"]
        assert torch.equal(own, expected if method == "comrope-ap" else torch.zeros_like(own))
    others = finetuned(tmp_path / "ap", "comrope-ap", model__rotate_values=True)
    with pytest.raises(UserError, match=r"model\.rotate_values: expected False, that of .*/ap"):
        begin_with(build_model(others), others)
    near = finetuned(pretrained, "comrope-ap", model__locality_bias=4.0)
    with pytest.raises(
        UserError, match=r"model\.locality_bias: expected 0, since the biases of .* got 4"
    ):
        begin_with(build_model(near), near)


def test_another_number_of_classes_gets_a_head_of_its_own(pretrained):
    config = finetuned(pretrained, data__num_classes=7)
    model = build_model(config)
    fresh = model.head.weight.detach().clone()
    assert {"head.weight", "head.bias"} <= set(begin_with(model, config)["new"])
    assert torch.equal(model.head.weight, fresh)


def test_absolute_positions_are_not_lost_without_a_word(pretrained, tmp_path, capfd):
    train(finetuned(pretrained, model__ape=False), tmp_path / "run", progress=False)
    said = " ".join(capfd.readouterr().err.split())
    assert "the absolute positions of" in said
    assert "model.ape=true keeps them" in said
    assert "ape.codebook" not in weights(tmp_path / "run")


def kill_after(step: int, config, folder: Path) -> None:
    process = in_process(config, folder)
    while not (folder / "checkpoints" / f"step-{step:08d}" / "state.json").exists():
        assert process.is_alive()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_resumed_after_its_start_is_gone_it_ends_with_the_same_weights(
    how, pretrained, tmp_path, monkeypatch
):
    start = tmp_path / "start"
    shutil.copytree(pretrained, start)
    ema = 0.9 if how == "stopped" else None  # the average starts from there too
    config = finetuned(start, train__checkpoint_every=1, train__keep=100, train__ema=ema)
    train(config, tmp_path / "whole", progress=False)
    if how == "killed":
        kill_after(5, config, tmp_path / "parts")
    else:
        stop_after(5, config, tmp_path / "parts", monkeypatch)
    assert not (tmp_path / "parts" / "result.json").exists()
    start.rename(tmp_path / "elsewhere")
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    with pytest.raises(UserError, match=r"train.start_from: .*start holds no run"):
        train(config, tmp_path / "new", progress=False)


def test_the_start_decides_what_a_run_is_by_its_name_wherever_it_is():
    here, there, other = (finetuned(path) for path in ("a/ape-1", "/b/c/ape-1/", "a/ape-2"))
    assert differences(here, there) == []
    assert differences(here, other) == ["train.start_from: 'ape-1', there 'ape-2'"]
    assert run_name(here) == run_name(there) != run_name(other)


class Trap:
    """Whoever reads it as a pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def _break(run: Path, how: str) -> dict[str, object]:
    """Damage a copy of the run, or ask of it what it cannot give."""
    file = run / "model.safetensors"
    if how == "no run":
        shutil.rmtree(run)
    elif how == "unfinished":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "pickle":
        file.write_bytes(pickle.dumps(Trap(run.parent / "sprung")))
    return {
        "patch": {"model__name": "vit_nano_patch2_12"},
        "size": {"model__name": "vit_tiny_patch4_12", "model__block_size": 4},
        "scale": {"model__layer_scale": 0.1},
        "timm": {"train__start_from": "timm:no_such_model"},
        "forgotten": {"train__start_from": load_recipe("digits_finetune").train.start_from},
    }.get(how, {})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no run", r"holds no run \(no config.yaml\)"),
        ("unfinished", r"is not finished \(no model.safetensors\); train it first"),
        ("cut", r"model.safetensors cannot be read"),
        ("pickle", r"model.safetensors cannot be read"),
        ("patch", r"does not fit: ape.codebook has shape \(9, 64\), expected \(36, 64\)|"
                  r"does not fit: patches.proj.weight has shape"),
        ("size", r"does not fit: cls_token has shape \(1, 1, 64\), expected \(1, 1, 192\)"),
        ("scale", r"does not fit: blocks.0.scale1.gamma is missing; .* and 3 more"),
        ("timm", r"timm has no weights 'no_such_model'"),
        ("forgotten", r"not given; say which run to start from"),
    ],
)  # fmt: skip
def test_a_start_that_does_not_fit_is_named_in_a_line(how, message, pretrained, tmp_path):
    run = tmp_path / "start"
    shutil.copytree(pretrained, run)
    options = _break(run, how)
    fields = {f"{n.replace('__', '.')}": v for n, v in options.items()}
    config = finetuned(run).with_overrides(fields)
    with pytest.raises(UserError, match=r"^train.start_from: .*" + f"({message})") as caught:
        train(config, tmp_path / "run", progress=False)
    assert "\n" not in str(caught.value)
    assert not any(p.suffix for p in (tmp_path / "run").iterdir())
    assert not (tmp_path / "sprung").exists()


def test_what_is_missing_besides_angles_is_an_error(pretrained, tmp_path):
    train(finetuned(pretrained, model__ape=False), tmp_path / "rotary", progress=False)
    with pytest.raises(UserError, match=r"does not fit: ape.codebook is missing"):
        train(finetuned(tmp_path / "rotary", "ape"), tmp_path / "run", progress=False)
    smaller = finetuned(tmp_path / "rotary", model__ape=False, model__block_size=4)
    with pytest.raises(UserError, match=r"does not fit: blocks.0.attn.rope.method.P has shape"):
        train(smaller, tmp_path / "run", progress=False)
