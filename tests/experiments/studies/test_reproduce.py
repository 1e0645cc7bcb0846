"""``comrope reproduce``: what is trained, what is gathered, and what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.studies import finish_runs, table_lines

from comrope.experiments import launch
from comrope.experiments.cli import app
from comrope.experiments.cluster import Cluster
from comrope.experiments.common.console import console
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.studies import PRESETS, STUDIES, find_study
from comrope.experiments.studies.plan import Request
from comrope.experiments.studies.reproduce import _describe_data, paper_figures, reproduce
from comrope.experiments.studies.study import PUBLISHED

pytestmark = pytest.mark.usefixtures("one_thread")
TOY = '''
"""A study outside of comrope: does a wider ViT help?"""

from matplotlib.figure import Figure

from comrope.experiments.studies.study import Row, Scale, Study
from comrope.experiments.studies.tables import accuracy_by_resolution


def rows(preset):
    return [Row("comrope-ld"), Row("comrope-ld", fields=(("train.ema", 0.5),), label="averaged")]


def figure(results):
    drawing = Figure()
    drawing.subplots().plot([row["top1"]["12"]["mean"] for row in results["rows"]])
    return drawing


STUDY = Study(
    name="toy",
    title="Averaged weights",
    scales={"demo": Scale("digits", "digits")},
    seeds=lambda preset: 1,
    rows=rows,
    table=accuracy_by_resolution,
    figure=figure,
)
'''


def accuracy(config, resolution: int) -> float:
    of_method = ("none", *PUBLISHED).index(config.model.position)
    return 60.0 + of_method + config.train.seed + resolution / 1000


def gathered(out, name: str = "comparison", seeds: int | None = 2, **options) -> dict:
    return reproduce(name, preset="small", out=out, seeds=seeds, gather=True, **options)


def files(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*-*/*") if path.is_file()}


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(launch, "slots", lambda device, per_gpu: [launch.Slot(None, 1)])


def test_only_results_are_needed_and_a_second_time_writes_the_same(tmp_path, monkeypatch):
    def no_training(*_, **__):
        raise AssertionError

    monkeypatch.setattr("comrope.experiments.studies.reproduce.run_all", no_training)
    finish_runs(tmp_path, "comparison", accuracy)
    results = gathered(tmp_path)
    assert len(results["rows"]) == 23
    assert results["seeds"] == 2
    assert results["rows"][0]["top1"]["128"]["values"] == [61.128, 62.128]
    assert results["machine"]["date"] == "2026-01-02"  # of the newest run
    first = files(tmp_path)
    assert set(first) == {"results.json", "table.md", "figure.png"}
    assert gathered(tmp_path, data="elsewhere")["rows"] == results["rows"]
    gathered(tmp_path)
    assert files(tmp_path) == first


def test_rows_have_the_existing_seeds_and_missing_rows_are_named(tmp_path):
    folders = finish_runs(tmp_path, "comparison", accuracy)
    for row, places in folders.items():
        if row.method == "ape" and row.perturbation:
            (places[0] / "result.json").unlink()  # begun, not finished
        if row.method == "liere":
            shutil.rmtree(places[0]), shutil.rmtree(places[1])
    with console.capture() as printed:
        results = gathered(tmp_path)
    counts = {(r["method"], r["perturbation"]): len(r["runs"]) for r in results["rows"]}
    assert counts["ape", 1.0] == 1
    assert counts["ape", 0.0] == 2
    assert ("liere", 1.0) not in counts
    missing = ["LieRE (σ 1)", "LieRE (σ 0)", "LieRE, extended"]
    assert results["missing"] == missing
    assert [line.partition(": ")[2] for line in printed.get().splitlines()] == missing
    (folder,) = tmp_path.glob("comparison-*")
    text = (folder / "table.md").read_text()
    assert "1 to 2 seeds" in text
    assert ["ComRoPE-LD", "APE", "1", "1", "+5.00", "undecided", "+5.00", "undecided"] in (
        table_lines(text)
    )  # of the seed that both have


@pytest.mark.parametrize("name", ["classification", "perturbation", "finetune", "tuning", "values"])
def test_every_study_without_measurements_is_gathered(name, tmp_path):
    finish_runs(tmp_path, name, accuracy)
    assert gathered(tmp_path, name)["study"] == name
    (folder,) = tmp_path.glob(f"{name}-*")
    assert (folder / "figure.png").stat().st_size > 10_000


def test_what_cannot_be_gathered_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^out: "):
        gathered(tmp_path)
    with pytest.raises(UserError, match=r"^gather: "):
        gathered(tmp_path, "cost")
    finish_runs(tmp_path, "classification", accuracy)
    with pytest.raises(UserError, match=r"^out: .* measurements"):
        gathered(tmp_path, "offset")
    assert not list(tmp_path.glob("c*"))


def test_the_command_line_gathers(tmp_path, capsys):
    finish_runs(tmp_path, "comparison", accuracy)
    command = ["reproduce", "comparison", "--preset", "small", "--out", str(tmp_path), "--gather"]
    app(command, standalone_mode=False)
    assert f"figure:  {tmp_path}/comparison/figure.png" in capsys.readouterr().out


def test_a_study_outside_of_comrope_is_reproduced_by_its_import_path(
    in_this_process, tmp_path, monkeypatch, capsys
):
    (tmp_path / "toy_study.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    tiny = ["model.name=vit_nano_patch4_12", "train.epochs=1", "train.batch_size=720",
            "evaluate.resolutions=12,24"]  # fmt: skip
    command = ["reproduce", "toy_study:STUDY", *tiny, "--out", str(tmp_path / "out"), "--quiet"]
    app(command, standalone_mode=False)
    assert "# Averaged weights" in capsys.readouterr().out
    (folder,) = (tmp_path / "out").glob("toy-*")
    results = json.loads((folder / "results.json").read_text())
    assert [row["label"] for row in results["rows"]] == ["", "averaged"]
    assert {path.name for path in folder.iterdir()} == {"results.json", "table.md", "figure.png"}
    app([*command, "--gather"], standalone_mode=False)
    assert json.loads((folder / "results.json").read_text())["rows"] == results["rows"]


def test_studies_are_found_by_name_or_import_path(tmp_path, monkeypatch):
    assert find_study("block-size") is STUDIES["block-size"]
    path = "comrope.experiments.studies.paper.block_size"
    assert find_study(f"{path}:STUDY") is STUDIES["block-size"]
    with pytest.raises(UserError, match=r"^name: .*did you mean block-size"):
        find_study("block_size")
    for wrong in (f"{path}:STUDI", "no.such.module:STUDY", f"{path}:SWEEP"):
        with pytest.raises(UserError, match=f"^name: '{wrong}'"):
            find_study(wrong)


def test_studies_are_listed(capsys):
    app(["reproduce"], standalone_mode=False)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*STUDIES]


def test_known_runs_are_not_trained_but_what_missing_ones_start_from_is(tmp_path, monkeypatch):
    seen: list[launch.Run] = []

    def note(runs, **_):
        seen.extend(runs)
        raise Interrupted("here")

    monkeypatch.setattr("comrope.experiments.studies.reproduce.run_all", note)
    folders = finish_runs(tmp_path / "known", "finetune", accuracy, preset="demo", root=None)
    options = {"out": tmp_path, "known": tmp_path / "known", "seeds": 2}
    with pytest.raises(Interrupted):
        reproduce("finetune", **options)
    assert seen == []
    for row, places in folders.items():
        if row.method == "liere":
            shutil.rmtree(places[1])
    with pytest.raises(Interrupted):
        reproduce("finetune", **options)
    assert [(j.config.train.seed, j.config.model.position) for j in seen] == [
        (1, "ape"),
        (1, "liere"),
    ]


def test_runs_go_seed_by_seed(tmp_path, monkeypatch):
    """So a study that is stopped has all its rows, with fewer seeds."""
    seen: list[launch.Run] = []

    def note(runs, **_):
        seen.extend(launch._in_order(runs))
        raise Interrupted("here")

    monkeypatch.setattr("comrope.experiments.studies.reproduce.run_all", note)
    with pytest.raises(Interrupted):
        reproduce("finetune", out=tmp_path, seeds=2, methods=("ape", "comrope-ld"))
    found = [(j.config.train.seed, j.config.model.position, j.start is not None) for j in seen]
    row = [("ape", False), ("ape", True), ("comrope-ld", True)]
    assert found == [(seed, *each) for seed in (0, 1) for each in row]


def test_what_is_wrong_with_a_run_is_reported_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr("comrope.experiments.studies.reproduce.run_all", pytest.fail)
    with pytest.raises(UserError, match=r"^evaluate\.resolutions: "):
        reproduce("classification", out=tmp_path, overrides=["evaluate.resolutions=13"])
    with pytest.raises(UserError, match=r"^data\.root: "):
        reproduce("classification", preset="small", out=tmp_path)


def test_another_model_is_called_by_its_name_and_that_of_its_data():
    request = Request(STUDIES["video"], PRESETS["small"])
    usual = load_recipe("gesture5")
    assert _describe_data(request, usual, {}) == "gesture5, the paper's 3D ViT at 112 px"
    other = usual.with_overrides({"model.name": "vit_nanovideo_patch16_64"})
    runs = {"rows": [{"runs": [{"data_root": "elsewhere/swipes"}, {"data_root": "swipes"}]}]}
    assert _describe_data(request, other, runs) == "swipes, vit_nanovideo_patch16_64"
    assert _describe_data(request, other, {}) == "ucf101, vit_nanovideo_patch16_64"


def test_the_papers_numbers_have_the_keys_of_results():
    assert set(paper_figures()["classification"]["top1"]["ape"]) == {"0", "1"}


def test_results_go_to_a_folder_of_their_own_if_a_command_changes_them():
    study, preset = STUDIES["offset"], PRESETS["demo"]
    folders = [
        Request(study, preset, **changes).folder
        for changes in ({}, {"methods": ("liere",)}, {"seeds": 1}, {"overrides": ("optim.lr=1",)})
    ]
    assert folders[0] == "offset"
    assert len(set(folders)) == 4
    assert folders[1].startswith("offset-liere-")
    assert Path(folders[2]).name == folders[2]


def test_studies_that_train_nothing_have_no_jobs(tmp_path):
    local = Cluster("local", {})
    for name, options in {"cost": {}, "offset": {"gather": True}, "video": {"per_gpu": 2}}.items():
        with pytest.raises(UserError, match=r"^cluster: "):
            reproduce(name, out=tmp_path, cluster=local, **options)
