"""Accuracy when coordinates are moved: measured from weights, gathered, and in a table."""

from __future__ import annotations

import json

import pytest
from support.runs import tiny
from support.studies import finish_run, finish_runs, plan_of, results_of, row_of
from support.studies import table_lines as lines_of

from comrope.experiments.studies import STUDIES
from comrope.experiments.studies.paper.offset import accuracy_by_offset
from comrope.experiments.studies.reproduce import reproduce

pytestmark = pytest.mark.usefixtures("one_thread")


def test_absolute_positions_cannot_be_moved():
    assert "ape" not in {row.method for row in plan_of("offset").rows}


def test_a_model_with_rotations_only_is_not_changed(tmp_path):
    config = tiny(model__position="comrope-ld")
    folder = finish_run(config, tmp_path, {"12": 0.0}, weights=True)
    found = accuracy_by_offset(config, folder)["offset"]
    assert list(found) == ["0", "0.25", "0.5", "1", "2", "4"]
    assert max(found.values()) - min(found.values()) < 0.5


def test_kept_measurements_are_gathered_without_data(tmp_path):
    finish_runs(tmp_path, "offset", lambda *_: 60.0)
    for folder in (tmp_path / "runs").iterdir():
        about = {"root": "elsewhere", "crop_pct": 1.0, "rho": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]}
        known = {"about": about, "found": {"offset": {"0": 61.0, "4": 60.5}}}
        (folder / "offset.json").write_text(json.dumps(known))
    results = reproduce("offset", preset="small", out=tmp_path, seeds=2, gather=True)
    assert results["rows"][0]["offset"]["4"]["values"] == [60.5, 60.5]
    (folder,) = tmp_path.glob("offset-*")
    assert (folder / "figure.png").stat().st_size > 10_000


def test_a_class_token_that_does_not_move_with_its_image_is_mentioned():
    moved = {"offset": {"0": {"mean": 61.0, "std": None}, "4": {"mean": 50.0, "std": None}}}
    unrotated = {"fields": {"model.class_position": "unrotated"}}
    rows = [row_of({0: {"8": 1.0}}, "rope", **moved, **about) for about in (unrotated, {})]
    for row in rows:
        row["runs"] = [{"seed": 0, "offset": {"0": 61.0, "4": 50.0}}]
    lines = lines_of(STUDIES["offset"].table(results_of(rows)))
    assert ["vanilla RoPE, class token unrotated", "61.00", "50.00", "11.00"] in lines
    assert ["vanilla RoPE", "61.00", "50.00", "11.00"] in lines
