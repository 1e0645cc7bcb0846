"""The study of clips: what its tables say, its control, and clips that are played backwards."""

from __future__ import annotations

import json

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.runs.directory import RESULT
from comrope.experiments.studies import backwards
from comrope.experiments.studies.paper import video
from comrope.experiments.studies.paper.video import pair_of, told_apart
from comrope.experiments.studies.reproduce import reproduce
from experiments.results import cell_of, results_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_row_is_compared_with_baselines_that_have_its_noise():
    def cell(method, level, **about):
        return cell_of({s: {"8": level, "16": level + 10 + s} for s in range(2)}, method, **about)

    cells = [cell("ape", 40.0), cell("rope", 50.0), cell("comrope-ld", 49.0)]
    cells += [cell("comrope-ld", 90.0, perturbation=0.0)]
    lines = video._over_baselines(results_of(cells)).splitlines()
    nine, one = "+9.00 [+9.00, +9.00] | better", "-1.00 [-1.00, -1.00] | worse"
    assert f"| ComRoPE-LD | 1 | {nine} | {nine} | {one} |" in lines
    assert "| ComRoPE-LD | 0 | – | – | – | – | – | – |" in lines
    assert video._over_baselines(results_of(cells[3:])) == ""


def test_swipes_told_apart():
    counts = [[5, 3, 2], [1, 6, 0], [4, 0, 9]]
    run = {"classes": ["LeftSwipe", "RightSwipe", "Stop"], "taken_for": counts}
    pair = pair_of(run["classes"])
    assert pair == ("LeftSwipe", "RightSwipe")
    assert told_apart(pair, run) == 100 * 11 / 15
    assert told_apart(pair, run, {**run, "taken_for": [[9, 0, 0], [5, 1, 1], [0] * 3]}) == 70
    assert pair_of(["a", "b", "c"]) is pair_of(None) is None


def test_what_time_is_good_for_is_told_seed_by_seed():
    def run(seed, right):
        counts = [[right, 10 - right, 0], [0, 10, 0], [0, 0, 5]]
        return {"seed": seed, "classes": ["LeftSwipe", "RightSwipe", "Stop"], "taken_for": counts}

    top1 = {s: {"8": 1.0, "16": 1.0} for s in range(3)}
    told = cell_of(top1, "comrope-ld") | {"runs": [run(s, 8 + s % 2) for s in range(3)]}
    control = cell_of(top1, "comrope-ld", timeless=True) | {"runs": [run(s, 4) for s in range(3)]}
    said = video._of_other_clips([told, control])
    assert "told the time: +21.67 [+14.50, +28.84], better." in said
    assert "Told apart" not in video._of_other_clips([told])


def test_what_is_seen_backwards_counts_as_what_it_then_shows():
    """Who sees no order takes either way for the same: right for one of the two."""
    blind, seeing = [[7, 3, 1], [2, 8, 0], [0, 0, 5]], [[1, 9, 1], [8, 2, 0], [0, 0, 5]]
    run = {"seed": 0, "classes": ["LeftSwipe", "RightSwipe", "Stop"]}
    for back, way, both in ((blind, 25.0, 50.0), (seeing, 85.0, 80.0)):
        looked = {**run, "both_ways": {"forwards": blind, "backwards": back}}
        ways = backwards._ways({"runs": [looked]}, ("LeftSwipe", "RightSwipe"))
        assert ways == {"forwards": [75.0], "backwards": [way], "both": [both]}


def test_the_study_has_a_control_and_its_models_are_seen_backwards(tmp_path):
    options = {
        "out": tmp_path,
        "methods": ["comrope-ld"],
        "overrides": [
            "train.epochs=3",
            "evaluate.resolutions=12",
            "evaluate.frames=",
            "evaluate.spans=",
        ],
        "progress": False,
    }
    found = reproduce("video", **options)
    assert [cell["timeless"] for cell in found["cells"]] == [False, True]
    (folder,) = tmp_path.glob("video*")
    assert "not told the time" in (folder / "table.md").read_text()
    assert (folder / "figure.png").stat().st_size > 10_000
    models = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model.safetensors")}
    found = reproduce("backwards", **options)
    assert {path: path.stat().st_mtime_ns for path in models} == models
    told, untold = (backwards._ways(cell, ("left", "right")) for cell in found["cells"])
    assert min(told["forwards"] + told["backwards"]) > 80
    assert untold["both"] == [50.0]
    (folder,) = tmp_path.glob("backwards*")
    assert "| ComRoPE-LD, not told the time |" in (folder / "table.md").read_text()
    assert (folder / "figure.png").stat().st_size > 10_000
    for kept in tmp_path.glob("runs/*/backwards.json"):
        kept.unlink()
    assert reproduce("backwards", gather=True, **options)["cells"] == found["cells"]
    with pytest.raises(UserError, match="preset: UCF-101 has no two classes"):
        reproduce("backwards", preset="paper", out=tmp_path, progress=False)
    for path in tmp_path.glob(f"runs/*/{RESULT}"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "classes": ["a", "b"]}))
        (path.parent / "backwards.json").unlink()
    with pytest.raises(UserError, match="expected two classes of which one is the other backwards"):
        reproduce("backwards", **options)
