"""The study of clips: its control without the time axis, and its tables."""

from __future__ import annotations

import pytest
from support.studies import plan_of, results_of, row_of, table_lines

from comrope.experiments import launch
from comrope.experiments.studies.paper import video
from comrope.experiments.studies.paper.video import NO_TIME, pair_accuracy, pair_of
from comrope.experiments.studies.reproduce import reproduce

CLASSES = ["LeftSwipe", "RightSwipe", "Stop"]


def test_the_control_has_no_time_axis():
    rows = plan_of("video", "small").rows
    (control,) = (row for row in rows if row.fields)
    assert control.name == "ComRoPE-LD, time axis removed"
    for row, configs in rows.items():
        assert (configs[0].model.axis_scale == (0, 1, 1)) == (row is control)


def test_a_row_is_compared_with_baselines_that_have_its_perturbation():
    def row(method, level, **about):
        return row_of({s: {"8": level, "16": level + 10 + s} for s in range(2)}, method, **about)

    rows = [row("ape", 40.0), row("rope", 50.0), row("comrope-ld", 49.0)]
    rows += [row("comrope-ld", 90.0, perturbation=0.0)]
    lines = table_lines(video.over_baselines(results_of(rows)))
    nine, one = ["+9.00 [+9.00, +9.00]", "better"], ["-1.00 [-1.00, -1.00]", "worse"]
    assert ["ComRoPE-LD", "1", *nine, *nine, *one] in lines
    assert ["ComRoPE-LD", "0", *["–"] * 6] in lines
    assert video.over_baselines(results_of(rows[3:])) == ""


def test_accuracy_among_two_classes_counts_answers_within_the_pair():
    run = {"classes": CLASSES, "confusion": [[5, 3, 2], [1, 6, 0], [4, 0, 9]]}
    pair = pair_of(run["classes"])
    assert pair == ("LeftSwipe", "RightSwipe")
    assert pair_accuracy(pair, run) == 100 * 11 / 15
    assert pair_of(["a", "b", "c"]) is pair_of(None) is None


def test_the_gain_of_the_time_axis_is_paired_by_seed():
    def run(seed, right):
        counts = [[right, 10 - right, 0], [0, 10, 0], [0, 0, 5]]
        return {"seed": seed, "classes": CLASSES, "confusion": counts}

    top1 = {s: {"8": 1.0, "16": 1.0} for s in range(3)}
    row = row_of(top1, "comrope-ld") | {"runs": [run(s, 8 + s % 2) for s in range(3)]}
    control = row_of(top1, "comrope-ld", fields=dict([NO_TIME]), label="control")
    control["runs"] = [run(s, 4) for s in range(3)]
    text = video.other_clips([row, control])
    assert "ComRoPE-LD over control: +21.67 [+14.50, +28.84], better." in text
    assert "over" not in video.other_clips([row])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_study_trains_a_row_and_its_control(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "slots", lambda *_: [launch.Slot(None, 1)])
    overrides = ["train.epochs=1", "evaluate.resolutions=12", "evaluate.frames=", "evaluate.spans="]
    found = reproduce(
        "video", out=tmp_path, methods=["comrope-ld"], overrides=overrides, progress=False
    )
    assert [row["label"] for row in found["rows"]] == ["", "ComRoPE-LD, time axis removed"]
    (folder,) = tmp_path.glob("video*")
    assert "time axis removed" in (folder / "table.md").read_text()
    assert (folder / "figure.png").stat().st_size > 10_000
