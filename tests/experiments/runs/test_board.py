"""Scalars for TensorBoard: as they were, or none, but never an error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from comrope.experiments.runs.board import Board
from comrope.experiments.runs.directory import LOG
from comrope.experiments.runs.log import Log, read_log

pytest.importorskip("tensorboard")


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


def test_it_has_the_numbers_of_a_log(tmp_path):
    log = Log(tmp_path, resume_from=0)
    for step in (1, 2):
        log.write("train", step=step, loss=1 / step, epoch=step, note="text", more={"a": 1})
    assert shown(tmp_path / "tensorboard") == {
        "train/loss": [(1, 1.0), (2, 0.5)],
        "train/epoch": [(1, 1.0), (2, 2.0)],
    }


def test_steps_that_a_resume_repeats_are_shown_once(tmp_path):
    for resume_from, loss in ((0, 1.0), (2, 0.5)):
        board = Board(tmp_path / "tensorboard", resume_from=resume_from)
        for step in range(resume_from + 1, 5):
            board.add(step, {"loss": loss})
    expected = [(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5)]
    assert shown(tmp_path / "tensorboard") == {"loss": expected}


def a_full_disk(folder: Path) -> None:
    (file,) = folder.iterdir()
    file.unlink()
    file.symlink_to("/dev/full")


@pytest.mark.parametrize(
    "act",
    [
        lambda folder: shutil.rmtree(folder.parent),
        lambda folder: (shutil.rmtree(folder), folder.touch()),
        pytest.param(
            a_full_disk,
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full"),
        ),
    ],
)
def test_what_cannot_be_written_is_one_line(act, tmp_path, capfd):
    folder = tmp_path / "run" / "tensorboard"
    folder.parent.mkdir()
    board = Board(folder, resume_from=0)
    act(folder)
    for step in range(30):  # more than a queue holds
        board.add(step, {"loss": 1.0})
    printed = " ".join(capfd.readouterr().err.split())
    assert printed.count("cannot be written") == 1
    assert str(folder) in printed


def test_a_folder_of_any_name(tmp_path, capfd):
    """TensorBoard itself refuses this one."""
    folder = tmp_path / os.fsdecode(b"\xe9")
    folder.mkdir()
    log = Log(folder, resume_from=0)
    log.write("train", step=1, loss=0.5)
    assert [record["step"] for record in read_log(folder / LOG)] == [1]
    assert list(folder.glob("tensorboard/events*"))
    assert capfd.readouterr().err == ""
