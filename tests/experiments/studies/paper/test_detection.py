"""Tab. 2: its table and figure, and a study that trains."""

from __future__ import annotations

import pytest
from support.studies import plan_of, results_of, row_of, table_lines

from comrope.experiments import launch
from comrope.experiments.data import scenes
from comrope.experiments.studies import STUDIES
from comrope.experiments.studies.paper.detection import ap_by_epoch
from comrope.experiments.studies.reproduce import paper_figures, reproduce
from comrope.experiments.tasks.coco_metrics import METRICS

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ("train.epochs=1", "train.batch_size=16", "train.log_every=1", "evaluate.every=1")


def made_up(*, masks: bool = False) -> dict:
    def row(method, level):
        figures = dict.fromkeys(METRICS, level) | {"APs": None}
        figures |= {"masks": dict.fromkeys(METRICS, level - 1)} if masks else {}
        runs = [
            {
                "seed": seed,
                "figures": {"16": {**figures, "AP": level + seed}},
                "by_epoch": {"1": level, "2": level + seed},
                "images_per_second": 50.0,
                "peak_memory_gib": None,
            }
            for seed in range(2)
        ]
        return row_of({0: {"8": 1.0}}, method, finetuned=True) | {"runs": runs}

    train = {"epochs": 20, "start_from": "somewhere"}
    recipe = {"train": train, "optim": {"lr": 1.0, "angle_lr_scale": 2.0, "layer_decay": 0.8}}
    rows = [row("ape", 40.0), row("comrope-ld", 42.0)]
    return results_of(rows, recipe=recipe, paper=paper_figures())


def test_the_table_has_six_metrics_and_differences_from_ape():
    lines = table_lines(STUDIES["detection"].table(made_up()))
    (ours,) = (line for line in lines if line[0] == "ComRoPE-LD" and len(line) > 7)
    assert ours[1] == "42.5 ± 0.7"
    assert ours[4] == "–"  # no small objects
    assert ours[-4:] == ["+2.00 [+2.00, +2.00]", "better", "50", "–"]
    assert ["ComRoPE-LD", "44.7", "67.6", "48.5", "29.2", "47.1", "60.0"] in lines  # the paper's
    assert len([line for line in lines if line[0] == "APE"]) == 2
    with_masks = table_lines(STUDIES["detection"].table(made_up(masks=True)))
    assert len([line for line in with_masks if line[0] == "APE"]) == 3


def test_the_figure_has_curves_and_last_epochs():
    curves, ends = STUDIES["detection"].figure(made_up()).axes
    assert [line.get_label() for line in curves.get_lines()] == ["APE", "ComRoPE-LD"]
    assert ends.get_xlabel() == "AP, %"


def test_ap_by_epoch_ends_with_the_result():
    config = next(iter(plan_of("detection", gather=True).rows.values()))[0]
    (config,) = [*plan_of("detection").rows.values()][1]

    class Record:
        evaluations = ({"epoch": 1, "AP": 3.0},)
        result = {"AP": {"48": 5.0}}  # noqa: RUF012

    last = str(config.train.epochs)
    assert ap_by_epoch(Record, config) == {"by_epoch": {"1": 3.0, last: 5.0}}
    Record.result = {"top1": {}}
    assert ap_by_epoch(Record, config) == {}


@pytest.mark.slow
def test_the_study_trains_a_backbone_first_and_draws_what_is_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scenes, "SCENES", {"train": 64, "val": 16})
    monkeypatch.setattr(launch, "slots", lambda *_: [launch.Slot(None, 1)])  # in this process
    results = reproduce(
        "detection",
        out=tmp_path,
        methods=("ape", "comrope-torus"),
        overrides=[*SHORT, "pretrain.train.epochs=1"],
        progress=False,
    )
    before, plain, torus = results["rows"]
    assert before["top1"]
    assert not before["finetuned"]
    assert results["pretraining"]["model"]["name"] == "vit_nano_patch4_24"
    for row in (plain, torus):
        assert set(row["runs"][0]["by_epoch"]) == {"1"}
        assert 0 <= row["AP"]["48"]["mean"] <= 100
    assert "| comrope-torus (all commuting) |" in capsys.readouterr().out
    (folder,) = tmp_path.glob("detection-*")
    for name in ("figure.png", "detections.png"):
        assert (folder / name).stat().st_size > 10_000
