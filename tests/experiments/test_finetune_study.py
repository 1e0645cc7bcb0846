"""The study of fine-tuning: its rows, what is run first, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comrope.experiments import launch
from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.launch import Task, run_all
from comrope.experiments.studies import PRESETS, STUDIES, run_name
from comrope.experiments.studies.plan import make_plan
from comrope.experiments.studies.reproduce import reproduce
from experiments.runs import finetuned, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_rows_of_the_study():
    fields = ("train.epochs=2", "optim.lr=1e-4", "model.name=vit_nano_patch4_12", "data.workers=1",
              "pretrain.train.epochs=3")  # fmt: skip
    plan = make_plan(STUDIES["finetune"], PRESETS["demo"], Path("runs"), overrides=fields)
    before, *after = plan.rows
    for seed, config in enumerate(plan.rows[before]):
        assert (config.model.position, config.train.epochs) == ("ape", 3)
        assert config.optim == load_recipe("digits").optim
        assert (config.model.name, config.data.workers) == ("vit_nano_patch4_12", 1)
        for cell in after:
            row = plan.rows[cell][seed]
            assert row.train.start_from == str(Path("runs") / run_name(config))
            assert (row.train.seed, row.train.epochs, row.optim.lr) == (seed, 2, 1e-4)
            assert row.model.ape == (cell.method != "ape")
            assert row.model.init == ("normal" if cell.method in ("ape", "rope") else "zeros")
    assert [cell.method for cell in after] == list(PRESETS["demo"].methods)
    with pytest.raises(UserError, match=r"model.init: is what the rows of this study differ in"):
        make_plan(STUDIES["finetune"], PRESETS["demo"], Path(), overrides=["model.init=rope"])
    with pytest.raises(UserError, match=r"pretrain.train.epochs: no such field"):
        make_plan(STUDIES["offset"], PRESETS["demo"], Path(), overrides=fields[-1:])


def test_all_detectors_start_from_one_backbone():
    plan = make_plan(
        STUDIES["detection"], PRESETS["small"], Path("runs"), overrides=["pretrain.data.root=x"]
    )
    (backbone,), *rows = plan.rows.values()
    assert {len(row) for row in rows} == {3}
    starts = {config.train.start_from for row in rows for config in row}
    assert starts == {str(Path("runs") / run_name(backbone))}


def test_runs_go_seed_by_seed(tmp_path, monkeypatch):
    """So that what is stopped half-way has all its rows."""
    seen: list[Task] = []

    def note(tasks, **_):
        seen.extend(launch._in_order(tasks))
        raise Interrupted("here")

    monkeypatch.setattr("comrope.experiments.studies.reproduce.run_all", note)
    with pytest.raises(Interrupted):
        reproduce("finetune", out=tmp_path, seeds=2, methods=("ape", "comrope-ld"))
    told = [(t.config.train.seed, t.config.model.position, t.start is not None) for t in seen]
    row = [("ape", False), ("ape", True), ("comrope-ld", True)]
    assert told == [(seed, *each) for seed in (0, 1) for each in row]


def test_what_others_start_from_is_run_first(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(launch, "train", lambda config, folder, progress: ran.append(folder.name))
    monkeypatch.setattr(launch, "slots", lambda device, per_gpu: [launch.Slot(None, 1)])
    starts = {"c": "b", "b": "a", "d": "elsewhere", "a": None}
    tasks = [
        Task(tiny(train__start_from=start and str(tmp_path / start)), tmp_path / name)
        for name, start in starts.items()
    ]
    run_all(tasks, device="cpu", progress=False)
    assert ran == ["d", "a", "b", "c"]
    circle = [Task(tiny(train__start_from=str(tmp_path / "a")), tmp_path / "a")]
    with pytest.raises(UserError, match="start from each other"):
        run_all(circle, device="cpu", progress=False)


def test_processes_wait_for_what_they_start_from_and_not_for_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "slots", lambda device, per_gpu: [launch.Slot(None, 1)] * 2)
    first = tiny(model__position="ape", train__epochs=1, train__perturbation=0.0)
    configs = {
        "from-good": finetuned(tmp_path / "good"),
        "from-bad": finetuned(tmp_path / "bad"),
        "good": first,
        "bad": finetuned(tmp_path / "nowhere"),
    }
    tasks = [Task(config, tmp_path / name) for name, config in configs.items()]
    with pytest.raises(UserError) as caught:
        run_all(tasks, device="cpu", progress=False)
    assert str(caught.value).splitlines() == [
        f"bad: train.start_from: {tmp_path}/nowhere holds no run (no config.yaml)",
        f"from-bad: train.start_from: {tmp_path}/bad holds no run (no config.yaml)",
    ]
    assert (tmp_path / "from-good" / "result.json").exists()


def test_the_study_end_to_end_runs_what_is_missing_and_resumes(tmp_path, monkeypatch):
    """In this process; the processes of a study are tested elsewhere."""
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
    rows = [(cell["method"], cell["finetuned"]) for cell in results["cells"]]
    assert rows == [("ape", False), ("ape", True), ("rope", True), ("comrope-ld", True)]
    assert all(len(cell["top1"]["12"]["values"]) == 2 for cell in results["cells"])
    (folder,) = tmp_path.glob("finetune-ape-rope-comrope-ld-*")
    table = (folder / "table.md").read_text()
    assert "another model and data set, ImageNet-1K, a ViT pre-trained in CLIP" in table
    assert "| ComRoPE-LD | zero |" in table
    assert "80.17" in table  # the paper's
    ours, theirs = (cell["top1"]["12"]["values"] for cell in results["cells"][3:0:-2])
    gain = sum(a - b for a, b in zip(ours, theirs, strict=True)) / 2
    assert f"| {gain:+.2f} [" in table
    assert (folder / "figure.png").stat().st_size > 20_000
    assert json.loads((folder / "results.json").read_text())["pretraining"]["train"]["epochs"] == 1


def test_several_runs_share_a_gpu(monkeypatch):
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 2)
    places = launch.slots("auto", per_gpu=3)
    assert sorted(slot.gpu for slot in places) == [0, 0, 0, 1, 1, 1]
    assert {slot.gpu for slot in places[:2]} == {0, 1}  # first one on each
    assert len(launch.slots("auto")) == 2
