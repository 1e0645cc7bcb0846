"""Logs and checkpoints that are damaged: a run continues, or the reason is one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.faults import change_weights, copy_of, pickled, raises_line
from support.runs import same, weights
from support.toy import curve

from comrope.experiments.runs.directory import LOG
from comrope.experiments.runs.log import read_log
from comrope.experiments.training import checkpoint
from comrope.experiments.training.train import RunFolder, is_finished, train

# Logs

TRAIN = b'{"event": "train", "step": %d, "loss": 1.0}\n'
LOGS = {
    "empty": (b"", 0),
    "no UTF-8": (b"\xff\xfe\xfd\n" + TRAIN % 1, 1),
    "a number": (b"3\n", 1),
    "no event": (b'{"step": 1}\n', 1),
    "no figures": (b'{"event": "train", "step": 1}\n' * 3, 3),
    "a text for a step": (b'{"event": "train", "step": "1", "loss": 1.0}\n', 1),
    "NaN": (b'{"event": "train", "step": 1, "loss": NaN}\n', 1),
    "cut off": (TRAIN % 1 + b'{"event": "tra', 0),
    "no records": (b"what is this?\n" * 5, 5),
    "an event that is a number": (b'{"event": 1, "step": 1}\n', 1),
    "a negative step": (b'{"event": "resumed", "step": -1}\n', 1),
    "a step and a half": (b'{"event": "resumed", "step": 1.5}\n', 1),
    "an evaluation without an epoch": (b'{"event": "evaluation", "step": 1, "error": 1.0}\n', 1),
    "deep": (b"[" * 100_000 + b"\n", 1),
    "20 MB": (b"x" * 20_000_000 + b"\n" + TRAIN % 1, 1),
    "zeros": (bytes(10_000) + b"\n", 1),
    "a speed in words": (
        b'{"event": "train", "step": 1, "loss": 1, "points_per_second": "fast"}\n' * 9, 0
    ),
    "a list": (b'[{"event": "train"}]\n', 1),
}  # fmt: skip


@pytest.mark.parametrize("how", LOGS)
def test_no_log_stops_a_resume(how, stopped, tmp_path, capfd):
    content, dropped = LOGS[how]
    run = copy_of(stopped[0], tmp_path / "run")
    (run / LOG).write_bytes(content)
    result = train(curve(train__checkpoint_every=5), run, progress=False)
    said = capfd.readouterr().err
    assert same(weights(run), stopped[1])
    assert result["points_per_second"] > 0
    assert said.count("left out") == (1 if dropped else 0)
    assert not dropped or f"{run / LOG}: {dropped} line" in " ".join(said.split())
    steps = [r["step"] for r in read_log(run / LOG) if r["event"] == "train"]
    assert steps[-6:] == list(range(11, 17))


@pytest.mark.parametrize("content", [b"3\n", None])
def test_no_log_stops_the_end_of_a_training(content, tmp_path, monkeypatch):
    """Damaged or removed before the last record is written; resumed after the last step."""
    write = RunFolder.checkpoint

    def spoil(folder, state):
        write(folder, state)
        (folder.out / LOG).unlink()
        if content is not None:
            (folder.out / LOG).write_bytes(content)

    monkeypatch.setattr(RunFolder, "checkpoint", spoil)
    result = train(curve(), tmp_path / "run", progress=False)
    assert (result["points_per_second"], result["waiting_for_data"]) == (None, None)
    assert is_finished(curve(), tmp_path / "run")


def test_a_log_that_is_too_large_is_not_replaced(stopped, tmp_path):
    run = copy_of(stopped[0], tmp_path / "run")
    with (run / LOG).open("ab") as file:
        file.truncate(2**40)
    with raises_line(run / LOG, "move it away"):
        train(curve(train__checkpoint_every=5), run, progress=False)
    assert (run / LOG).stat().st_size == 2**40


# Checkpoints


def forge(path: Path, change=lambda values: None, **files: bytes) -> None:
    """Change a checkpoint and give it the sums of its new content."""
    for name, content in files.items():
        (path / f"{name}.safetensors").write_bytes(content)
    values = json.loads((path / "state.json").read_text().splitlines()[0])
    for name in values["sums"]:
        values["sums"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    change(values)
    write_state(path, json.dumps(values).encode())


def write_state(path: Path, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest().encode()
    (path / "state.json").write_bytes(content + b"\n" + digest + b"\n")


def trap(path: Path) -> bytes:
    return pickled(path.parent / "marker")


def as_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


CHECKPOINTS = {
    "no scaler": lambda path: forge(path, lambda v: v.pop("scaler")),
    "no optimizer": lambda path: forge(path, lambda v: v.pop("optimizer")),
    "no count of unreadable samples": lambda path: forge(path, lambda v: v.pop("unreadable")),
    "no step": lambda path: forge(path, lambda v: v.pop("step")),
    "another step": lambda path: forge(path, lambda v: v.update(step=3)),
    "no sums": lambda path: forge(path, lambda v: v.pop("sums")),
    "no sum of the weights": lambda path: forge(path, lambda v: v["sums"].pop("model.safetensors")),
    "a sum of a file elsewhere": lambda path: forge(
        path, lambda v: v["sums"].update({"../../config.yaml": "0" * 64})
    ),
    "an optimizer in words": lambda path: forge(path, lambda v: v.update(optimizer="adam")),
    "a learning rate in words": lambda path: forge(
        path, lambda v: v["optimizer"][0].update(lr="high")
    ),
    "a learning rate that is NaN": lambda path: forge(
        path, lambda v: v["optimizer"][0].update(lr=float("nan"))
    ),
    "a pickle for weights": lambda path: forge(path, model=trap(path)),
    "a pickle for the optimizer": lambda path: forge(path, optimizer=trap(path)),
    "a deep state": lambda path: write_state(path, b"[" * 100_000),
    "a state that is a list": lambda path: write_state(path, b"[]"),
    "a state that is no UTF-8": lambda path: write_state(path, b"\xff"),
    "a state of one line": lambda path: (path / "state.json").write_bytes(b"{}"),
    "an empty state": lambda path: (path / "state.json").write_bytes(b""),
    "a pickle for a state": lambda path: (path / "state.json").write_bytes(trap(path)),
    "a file for the folder": as_file,
    "a folder for weights": lambda path: (
        (path / "model.safetensors").unlink(),
        (path / "model.safetensors").mkdir(),
    ),
    "a pipe for a state": lambda path: (
        (path / "state.json").unlink(),
        os.mkfifo(path / "state.json"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(how, stopped, tmp_path, capfd):
    run = copy_of(stopped[0], tmp_path / "run")
    broken = run / "checkpoints" / "step-00000010"
    CHECKPOINTS[how](broken)
    train(curve(train__checkpoint_every=5), run, progress=False)
    said = " ".join(capfd.readouterr().err.split())
    assert f"checkpoint {broken} is damaged" in said
    assert "resumed at step 5" in said
    assert same(weights(run), stopped[1])
    assert not (broken.parent / "marker").exists()


@pytest.mark.parametrize("name", ["step-²", "step-", "step--1", "step-1e3", "step-٣", "step-old"])
def test_a_folder_without_a_step_in_its_name_is_named(name, stopped, tmp_path, capfd):
    run = copy_of(stopped[0], tmp_path / "run")
    odd = run / "checkpoints" / name
    shutil.copytree(run / "checkpoints" / "step-00000005", odd)
    assert checkpoint.latest(run / "checkpoints").step == 10
    assert str(odd) in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.update({"0.weight": t["0.weight"].long()}), "0.weight"),
        (lambda t: t.update({"0.weight": t["0.weight"].mT.contiguous()}), "0.weight"),
        (lambda t: t.pop("0.bias"), "0.bias"),
    ],
)
def test_weights_of_a_checkpoint_that_do_not_fit_are_named(change, named, stopped, tmp_path):
    run = copy_of(stopped[0], tmp_path / "run")
    path = run / "checkpoints" / "step-00000010"
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    forge(path)
    with raises_line(path, named):
        train(curve(train__checkpoint_every=5), run, progress=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: forge(path, lambda v: v["optimizer"].append({"lr": 1.0})),
        lambda path: change_weights(
            path / "optimizer.safetensors", lambda t: t.update({"9.weight/exp_avg": torch.ones(1)})
        ),
        lambda path: change_weights(
            path / "optimizer.safetensors", lambda t: t.pop("0.weight/exp_avg")
        ),
        lambda path: change_weights(
            path / "optimizer.safetensors", lambda t: t.update({"0.weight/exp_avg": torch.ones(3)})
        ),
    ],
)
def test_an_optimizer_of_another_model_is_named(change, stopped, tmp_path):
    run = copy_of(stopped[0], tmp_path / "run")
    path = run / "checkpoints" / "step-00000010"
    change(path)
    forge_sums = json.loads((path / "state.json").read_text().splitlines()[0])["optimizer"]
    forge(path, lambda v: v.update(optimizer=forge_sums))
    with raises_line(path, "optimizer"):
        train(curve(train__checkpoint_every=5), run, progress=False)
