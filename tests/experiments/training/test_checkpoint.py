"""Checkpoints are complete or do not exist; damaged ones are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from comrope.experiments.common.errors import UserError
from comrope.experiments.training import checkpoint

PARTS = ("model.safetensors", "optimizer.safetensors", "state.json")


def values(step: int) -> dict:
    return {"unreadable": step, "scaler": {}, "optimizer": [{"lr": 0.1}]}


def save(folder: Path, step: int, **options) -> Path:
    tensors = {"model": {"w": torch.full((100,), float(step))}, "optimizer": {"m": torch.ones(3)}}
    return checkpoint.save(folder, step, tensors, values(step), **options)


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "removed":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    path = save(tmp_path, 7)
    found = checkpoint.latest(tmp_path)
    assert (found.path, found.step, found.label) == (path, 7, str(path))
    assert found.values["unreadable"] == 7
    assert torch.equal(found.tensors("model")["w"], torch.full((100,), 7.0))
    assert torch.equal(found.tensors("optimizer")["m"], torch.ones(3))


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("how", ["truncated", "flipped", "removed"])
@pytest.mark.parametrize("name", PARTS)
def test_a_damaged_one_is_named_and_the_one_before_it_used(how, name, tmp_path, capfd):
    save(tmp_path, 8)
    broken = save(tmp_path, 10)
    damage(broken / name, how)
    assert checkpoint.latest(tmp_path).step == 8
    assert str(broken) in capfd.readouterr().err


def test_if_all_are_damaged_all_are_named(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2)]
    for path in paths:
        damage(path / "model.safetensors", "flipped")
    with pytest.raises(UserError) as caught:
        checkpoint.latest(tmp_path)
    assert all(str(path) in str(caught.value) for path in paths)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_full_disk_leaves_those_before_it(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(UserError, match=r"step-00000002.*No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path).step == 1
    assert names(tmp_path) == ["step-00000001"]


def test_a_resume_from_an_earlier_step_drops_what_came_after(tmp_path):
    for step in (100, 200):
        save(tmp_path, step)
    damage(tmp_path / "step-00000200" / "model.safetensors", "truncated")
    (tmp_path / ".writing-1").mkdir()  # left by a writer that was killed
    save(tmp_path, 150, keep=1)
    assert names(tmp_path) == ["step-00000150"]
    save(tmp_path, 150)
    assert checkpoint.latest(tmp_path).step == 150
