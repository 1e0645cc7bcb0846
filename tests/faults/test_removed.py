"""Files of a run that are removed while it trains, or before it resumes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.faults import copy_of, raises_line
from support.runs import same, weights
from support.toy import curve

from comrope._files import remove
from comrope.experiments.config import CONFIG
from comrope.experiments.runs.directory import LOCK, LOG
from comrope.experiments.training import checkpoint
from comrope.experiments.training.train import RunFolder, train
from comrope.experiments.training.verify import verify_run


def replaced(out: Path) -> None:
    """By another process, which trains there."""
    shutil.rmtree(out)
    out.mkdir()
    (out / LOCK).write_text("another process")


def emptied(out: Path) -> None:
    for path in out.iterdir():
        remove(path)


# What happens after step 8, and what the error names, if there is one.
REMOVED = {
    "the checkpoints": (lambda out: shutil.rmtree(out / "checkpoints"), None),
    "the configuration": (lambda out: (out / CONFIG).unlink(), None),
    "the log": (lambda out: (out / LOG).unlink(), None),
    "the lock": (lambda out: (out / LOCK).unlink(), None),
    "all files": (emptied, None),
    "the folder": (shutil.rmtree, "with its checkpoints"),
    "the folder, for another run": (replaced, "another process"),
}


@pytest.mark.parametrize("how", REMOVED)
def test_what_is_removed_during_training_is_replaced_or_named(how, stopped, tmp_path, monkeypatch):
    act, named = REMOVED[how]
    out, config = tmp_path / "run", curve(train__checkpoint_every=5)

    def removed(folder, step):
        if step == 8:
            act(folder.out)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "should_stop", removed)
        if named is None:
            train(config, out, progress=False)
        else:
            with raises_line("out: ", out, named) as raised:
                train(config, out, progress=False)
            assert "unchanged" not in raised.text
    if named is not None:
        assert not out.exists() or os.listdir(out) == [LOCK]
        shutil.rmtree(out, ignore_errors=True)
        train(config, out, progress=False)
    assert same(weights(out), stopped[1])
    verify_run(out)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_checkpoint_that_cannot_be_written_counts_on_no_other(
    earlier, stopped, tmp_path, monkeypatch
):
    folder = copy_of(stopped[0], tmp_path / "run") / "checkpoints"

    def fail(*_):
        if not earlier:
            shutil.rmtree(folder)
        raise OSError(28, "No space left")

    monkeypatch.setattr(checkpoint, "save_tensors", fail)
    with raises_line(folder / "step-00000012", "No space left") as raised:
        checkpoint.save(folder, 12, {"model": {}}, {})
    assert ("unchanged" in raised.text) == earlier


def test_a_configuration_that_is_gone_is_named(stopped, tmp_path):
    run, config = copy_of(stopped[0], tmp_path / "run"), curve(train__checkpoint_every=5)
    content = (run / CONFIG).read_bytes()
    (run / CONFIG).unlink()
    before = sorted(path for path in run.rglob("*"))
    with raises_line("out: ", "checkpoints", f"no {CONFIG}", f"Restore {CONFIG}"):
        train(config, run, progress=False)
    assert sorted(path for path in run.rglob("*")) == before
    (run / CONFIG).write_bytes(content)
    train(config, run, progress=False)
    assert same(weights(run), stopped[1])
