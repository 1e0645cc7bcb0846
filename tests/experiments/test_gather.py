"""``reproduce --gather``: tables of the runs that are there, without their data."""

from __future__ import annotations

import json
import shutil

import pytest

from comrope.experiments.cli import app
from comrope.experiments.common.console import console
from comrope.experiments.common.errors import UserError
from comrope.experiments.studies import LABELS
from comrope.experiments.studies.markdown import seeds_said
from comrope.experiments.studies.reproduce import reproduce
from comrope.experiments.studies.tables import table
from experiments.results import cell_of, finish_runs, results_of


def accuracy(config, resolution: int) -> float:
    order = list(LABELS).index(config.model.position)
    return 60.0 + order + config.train.seed + resolution / 1000


def gathered(out, name: str = "comparison", seeds: int | None = 2, **options) -> dict:
    return reproduce(name, preset="small", out=out, seeds=seeds, gather=True, **options)


def files(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*-*/*") if path.is_file()}


def test_nothing_but_results_is_needed_and_a_second_time_writes_the_same(tmp_path, monkeypatch):
    def no_training(*_, **__):
        raise AssertionError

    monkeypatch.setattr("comrope.experiments.studies.reproduce.run_all", no_training)
    finish_runs(tmp_path, "comparison", accuracy)
    results = gathered(tmp_path)
    assert len(results["cells"]) == 23
    assert results["seeds"] == 2
    assert results["cells"][0]["top1"]["128"]["values"] == [61.128, 62.128]
    assert results["machine"]["date"] == "2026-01-02"  # of the newest run
    first = files(tmp_path)
    assert set(first) == {"results.json", "table.md", "figure.png"}
    gathered(tmp_path)
    assert files(tmp_path) == first


def test_the_data_may_lie_anywhere(tmp_path):
    """Trained on data at one place, gathered where it is at another, or nowhere."""
    finish_runs(tmp_path, "comparison", accuracy)
    here, there = gathered(tmp_path), gathered(tmp_path, data="elsewhere")
    assert here["cells"] == there["cells"]


def test_rows_have_the_seeds_that_are_there_and_missing_ones_are_named(tmp_path):
    folders = finish_runs(tmp_path, "comparison", accuracy)
    for cell, places in folders.items():
        if cell.method == "ape" and cell.perturbation:
            (places[0] / "result.json").unlink()  # begun, not finished
        if cell.method == "liere":
            shutil.rmtree(places[0]), shutil.rmtree(places[1])
    with console.capture() as said:
        results = gathered(tmp_path)
    counts = {(c["method"], c["perturbation"]): len(c["runs"]) for c in results["cells"]}
    assert counts["ape", 1.0] == 1
    assert counts["ape", 0.0] == 2
    assert ("liere", 1.0) not in counts
    assert said.get().splitlines() == [
        f"left out, no run is finished: {row}"
        for row in ("LieRE (σ 1)", "LieRE (σ 0)", "LieRE, values and near")
    ]
    (folder,) = tmp_path.glob("comparison-*")
    text = (folder / "table.md").read_text()
    assert "Mean ± standard deviation of 1 to 2 seeds." in text
    assert "| ComRoPE-LD | APE | 1 | 1 | +5.00 | undecided |" in text  # of the seed that both have


def test_a_run_that_was_not_asked_all_resolutions_is_not_there(tmp_path):
    finish_runs(tmp_path, "comparison", accuracy)
    for path in tmp_path.rglob("*-s1-*/result.json"):
        result = json.loads(path.read_text())
        del result["top1"]["64"]
        path.write_text(json.dumps(result))
    assert gathered(tmp_path)["seeds"] == 1


def test_other_studies_are_gathered_too(tmp_path):
    for name in ("classification", "perturbation", "finetune", "tuning", "ablation"):
        finish_runs(tmp_path / name, name, accuracy)
        assert gathered(tmp_path / name, name)["study"] == name


def test_fine_tuning_pairs_the_seeds_that_are_there(tmp_path):
    folders = finish_runs(tmp_path, "finetune", accuracy)
    for cell, places in folders.items():
        if cell.method == "ape":
            (places[0] / "result.json").unlink()
    results = gathered(tmp_path, "finetune")
    assert results["pretraining"]["train"]["epochs"] == 40
    (folder,) = tmp_path.glob("finetune-*")
    text = (folder / "table.md").read_text()
    assert "| ComRoPE-LD | zero | 66.63 ± 0.71 | +5.00 | undecided |" in text  # of one seed


def test_trials_that_are_missing_are_told_by_what_they_differ_in_or_by_their_number(tmp_path):
    folders = finish_runs(tmp_path, "tuning", accuracy, seeds=1)
    gone = {"ape": 1, "liere": 6}
    for cell, (place,) in reversed(folders.items()):
        if gone.get(cell.method, 0) and not cell.name:
            gone[cell.method] -= 1
            shutil.rmtree(place)
    assert gathered(tmp_path, "tuning", seeds=None)["missing"] == [
        "APE (optim.lr=0.002, optim.weight_decay=0.01)",
        "LieRE (6 rows)",
    ]
    (place,) = next(places for cell, places in folders.items() if cell.method == "comrope-ld")
    shutil.rmtree(place)
    missing = gathered(tmp_path, "tuning", seeds=None)["missing"]
    assert missing[-1] == "ComRoPE-LD (model.init=normal, model.spread=1, optim.angle_lr_scale=1)"


def test_what_others_start_from_counts_for_no_seeds():
    start, own = cell_of({0: {"8": 1.0}}), cell_of({s: {"8": 1.0} for s in range(3)})
    assert seeds_said(results_of([start, {**own, "finetuned": True}])) == "3 seeds"
    assert seeds_said(results_of([start, own])) == "1 to 3 seeds"


def test_what_cannot_be_gathered_is_told(tmp_path):
    with pytest.raises(UserError, match=r"out: .*runs holds no finished run of this study"):
        gathered(tmp_path)
    with pytest.raises(UserError, match="gather: the study cost has no runs"):
        gathered(tmp_path, "cost")
    finish_runs(tmp_path, "classification", accuracy)
    with pytest.raises(UserError, match="holds no finished run"):  # nor any moved images
        gathered(tmp_path, "offset")
    assert not list(tmp_path.glob("c*"))


def test_moved_images_are_gathered_as_they_are(tmp_path):
    finish_runs(tmp_path, "offset", accuracy)
    for folder in (tmp_path / "runs").iterdir():
        about = {"root": "elsewhere", "crop_pct": 1.0, "rho": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]}
        known = {"about": about, "found": {"offset": {"0": 61.0, "4": 60.5}}}
        (folder / "offset.json").write_text(json.dumps(known))
    results = gathered(tmp_path, "offset")
    assert results["cells"][0]["offset"]["4"]["values"] == [60.5, 60.5]


def test_a_class_token_that_does_not_move_with_its_image_is_told():
    moved = {"offset": {"0": {"mean": 61.0, "std": None}, "4": {"mean": 50.0, "std": None}}}
    unrotated = {"fields": {"model.class_position": "unrotated"}}
    cells = [cell_of({0: {"8": 1.0}}, "rope", **moved, **about) for about in (unrotated, {})]
    for cell in cells:
        cell["runs"] = [{"seed": 0, "offset": {"0": 61.0, "4": 50.0}}]
    text = table("offset", results_of(cells))
    assert "| vanilla RoPE, class token unrotated | 61.00 | 50.00 | 11.00 |" in text
    assert "| vanilla RoPE | 61.00 |" in text


def test_the_command_line_gathers(tmp_path, capsys):
    finish_runs(tmp_path, "comparison", accuracy)
    command = ["reproduce", "comparison", "--preset", "small", "--out", str(tmp_path), "--gather"]
    app(command, standalone_mode=False)
    assert f"figure:  {tmp_path}/comparison/figure.png" in capsys.readouterr().out
