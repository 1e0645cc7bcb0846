"""The log of a run: one record a line, each step once however often it was resumed."""

from __future__ import annotations

from comrope.experiments.runs.directory import LOG
from comrope.experiments.runs.log import Log, read_log


def steps(folder) -> list[tuple[str, int]]:
    return [(record["event"], record["step"]) for record in read_log(folder / LOG)]


def test_records_have_their_values_and_a_time(tmp_path):
    log = Log(tmp_path, resume_from=0)
    log.write("train", step=1, loss=0.5)
    log.write("evaluation", step=1, epoch=1, top1=90.0, note="text")
    first, second = read_log(tmp_path / LOG)
    assert first.pop("time") <= second.pop("time")
    assert first == {"event": "train", "step": 1, "loss": 0.5}
    assert second == {
        "event": "evaluation",
        "step": 1,
        "epoch": 1,
        "top1": 90.0,
        "note": "text",
    }


def test_steps_that_a_resume_repeats_are_dropped(tmp_path):
    log = Log(tmp_path, resume_from=0)
    for step in range(1, 6):
        log.write("train", step=step, loss=1.0)
    log = Log(tmp_path, resume_from=3)
    log.write("train", step=4, loss=1.0)
    train = [("train", step) for step in (1, 2, 3)]
    assert steps(tmp_path) == [*train, ("resumed", 3), ("train", 4)]


def test_a_line_that_a_kill_cut_off_is_no_record(tmp_path):
    log = Log(tmp_path, resume_from=0)
    log.write("train", step=1, loss=1.0)
    with (tmp_path / LOG).open("a") as file:
        file.write('{"event": "train", "st')
    assert steps(tmp_path) == [("train", 1)]
