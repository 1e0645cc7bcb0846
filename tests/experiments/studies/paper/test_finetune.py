"""The study of fine-tuning: its rows, what is run first, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.studies import finish_runs, plan_of

from comrope.experiments import launch
from comrope.experiments.config import load_recipe
from comrope.experiments.studies import PRESETS, STUDIES, run_name
from comrope.experiments.studies.reproduce import reproduce

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_rows_of_the_study():
    fields = ("train.epochs=2", "optim.lr=1e-4", "model.name=vit_nano_patch4_12", "data.workers=1",
              "pretrain.train.epochs=3")  # fmt: skip
    plan = plan_of("finetune", overrides=fields)
    before, *after = plan.rows
    for seed, config in enumerate(plan.rows[before]):
        assert (config.model.position, config.train.epochs) == ("ape", 3)
        assert config.optim == load_recipe("digits").optim
        assert (config.model.name, config.data.workers) == ("vit_nano_patch4_12", 1)
        for own in after:
            row = plan.rows[own][seed]
            assert row.train.start_from == str(Path("runs") / run_name(config))
            assert (row.train.seed, row.train.epochs, row.optim.lr) == (seed, 2, 1e-4)
            assert row.model.ape == (own.method != "ape")
            assert row.model.init == ("normal" if own.method in ("ape", "rope") else "zeros")
    assert [row.method for row in after] == list(PRESETS["demo"].methods)


def test_seeds_that_both_rows_have_are_paired(tmp_path):
    order = [*PRESETS["small"].methods]
    folders = finish_runs(
        tmp_path, "finetune", lambda c, _: 60.0 + order.index(c.model.position) + c.train.seed
    )
    for row, places in folders.items():
        if row.method == "ape":
            (places[0] / "result.json").unlink()
    results = reproduce("finetune", preset="small", out=tmp_path, seeds=2, gather=True)
    assert results["pretraining"]["train"]["epochs"] == 40
    text = STUDIES["finetune"].table(results)
    assert "| ComRoPE-LD | zero | 65.50 ± 0.71 | +5.00 | undecided |" in text  # of one seed


@pytest.mark.slow
def test_the_study_end_to_end_runs_what_is_missing_and_resumes(tmp_path, monkeypatch):
    """In this process; test_launch has several."""
    monkeypatch.setattr(launch, "slots", lambda device, per_gpu: [launch.Slot(None, 1)])
    settings = {
        "out": tmp_path,
        "seeds": 2,
        "overrides": ("model.name=vit_nano_patch4_12", "train.epochs=1", "train.batch_size=120",
                      "evaluate.resolutions=12,24", "pretrain.train.epochs=1"),
        "progress": False,
    }  # fmt: skip
    reproduce("finetune", methods=["ape"], **settings)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("runs/*/*") if p.is_file()}
    results = reproduce("finetune", methods=["ape", "rope", "comrope-ld"], **settings)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    rows = [(row["method"], row["finetuned"]) for row in results["rows"]]
    assert rows == [("ape", False), ("ape", True), ("rope", True), ("comrope-ld", True)]
    assert all(len(row["top1"]["12"]["values"]) == 2 for row in results["rows"])
    (folder,) = tmp_path.glob("finetune-ape-rope-comrope-ld-*")
    table = (folder / "table.md").read_text()
    assert "another model and data set, ImageNet-1K, a ViT pre-trained in CLIP" in table
    assert "| ComRoPE-LD | zero |" in table
    assert "80.17" in table  # the paper's
    ours, theirs = (row["top1"]["12"]["values"] for row in results["rows"][3:0:-2])
    gain = sum(a - b for a, b in zip(ours, theirs, strict=True)) / 2
    assert f"| {gain:+.2f} [" in table
    assert (folder / "figure.png").stat().st_size > 20_000
    assert json.loads((folder / "results.json").read_text())["pretraining"]["train"]["epochs"] == 1
