"""Low precision, compilation and resuming where they are meant to run."""

from __future__ import annotations

import pytest
import torch

from comrope.experiments.errors import Interrupted
from comrope.experiments.logs import read_log
from comrope.experiments.run import Run
from comrope.experiments.train import train
from experiments.runs import tiny

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
