"""Low precision, compilation and resuming where they are meant to run."""

from __future__ import annotations

import pytest
import torch
from support.runs import tiny

from comrope.experiments.common.errors import Interrupted
from comrope.experiments.config import load_recipe
from comrope.experiments.data import scenes
from comrope.experiments.runs.log import read_log
from comrope.experiments.training.train import train
from comrope.experiments.training.trainer import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]


def losses(folder):
    return [r["loss"] for r in read_log(folder / "log.jsonl") if r["event"] == "train"]


@pytest.mark.parametrize(
    ("precision", "compiled"), [("bf16", True), ("fp16", False), ("no", False)]
)
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(
    precision, compiled, tmp_path, monkeypatch
):
    config = tiny(
        train__device="auto",
        train__precision=precision,
        train__compile=compiled,
        optim__clip_grad=1.0,
        train__ema=0.9,
        evaluate__resolutions=(12, 24),
    )
    whole = train(config, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "should_stop", lambda run: run.step == 9)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "parts", progress=False)
    train(config, tmp_path / "parts", progress=False)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=5e-3)
    assert losses(tmp_path / "whole")[-1] < 2.0
    assert whole["machine"]["device"].startswith("NVIDIA")
    assert whole["peak_memory_gib"] > 0


@pytest.mark.parametrize("position", ["ape", "comrope-ld"])
def test_a_detector_with_a_recorded_backbone_learns_as_without(position, tmp_path, monkeypatch):
    """Stopped and resumed on the way, with an average of its weights and evaluated in between."""
    pytest.importorskip("pycocotools")
    monkeypatch.setattr(scenes, "SCENES", {"train": 192, "val": 16})
    fields = {
        "model.position": position,
        "model.init": "normal",
        "train.start_from": None,
        "train.device": "auto",
        "train.precision": "no",
        "train.compile": True,
        "train.epochs": 2,
        "train.batch_size": 16,
        "train.log_every": 1,
        "train.ema": 0.9,
        "evaluate.every": 1,
    }
    config = load_recipe("scenes").with_overrides(fields)
    train(config, tmp_path / "plain", progress=False)
    recorded = config.with_overrides({"detect.graph": True})
    with monkeypatch.context() as patch:
        patch.setattr(Run, "should_stop", lambda run: run.step == 9)
        with pytest.raises(Interrupted):
            train(recorded, tmp_path / "graph", progress=False)
    train(recorded, tmp_path / "graph", progress=False)
    plain, graph = losses(tmp_path / "plain"), losses(tmp_path / "graph")
    assert len(plain) == len(graph) == 24
    assert graph[:4] == pytest.approx(plain[:4], rel=1e-3)  # later, other proposals are drawn
    assert sum(graph[-6:]) == pytest.approx(sum(plain[-6:]), rel=0.1)
