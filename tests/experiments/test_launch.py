"""Many runs on many devices: in order, in processes, several on a GPU."""

from __future__ import annotations

import os
import signal

import pytest
from support.runs import finetuned, tiny

from comrope.experiments import launch
from comrope.experiments.common.errors import UserError
from comrope.experiments.launch import Run, run_all

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_others_start_from_is_run_first(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(launch, "train", lambda config, folder, progress: ran.append(folder.name))
    monkeypatch.setattr(launch, "slots", lambda device, per_gpu: [launch.Slot(None, 1)])
    starts = {"c": "b", "b": "a", "d": "elsewhere", "a": None}
    runs = [
        Run(tiny(train__start_from=start and str(tmp_path / start)), tmp_path / name)
        for name, start in starts.items()
    ]
    run_all(runs, device="cpu", progress=False)
    assert ran == ["d", "a", "b", "c"]
    circle = [Run(tiny(train__start_from=str(tmp_path / "a")), tmp_path / "a")]
    with pytest.raises(UserError, match="start from each other"):
        run_all(circle, device="cpu", progress=False)


@pytest.mark.slow
def test_processes_wait_for_what_they_start_from_and_not_for_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "slots", lambda device, per_gpu: [launch.Slot(None, 1)] * 2)
    first = tiny(model__position="ape", train__epochs=1, train__perturbation=0.0)
    configs = {
        "from-good": finetuned(tmp_path / "good"),
        "from-bad": finetuned(tmp_path / "bad"),
        "good": first,
        "bad": finetuned(tmp_path / "nowhere"),
    }
    runs = [Run(config, tmp_path / name) for name, config in configs.items()]
    with pytest.raises(UserError) as caught:
        run_all(runs, device="cpu", progress=False)
    assert str(caught.value).splitlines() == [
        f"bad: train.start_from: {tmp_path}/nowhere holds no run (no config.yaml)",
        f"from-bad: train.start_from: {tmp_path}/bad holds no run (no config.yaml)",
    ]
    assert (tmp_path / "from-good" / "result.json").exists()


def test_several_runs_share_a_gpu(monkeypatch):
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 2)
    places = launch.slots("auto", per_gpu=3)
    assert sorted(slot.gpu for slot in places) == [0, 0, 0, 1, 1, 1]
    assert {slot.gpu for slot in places[:2]} == {0, 1}  # first one on each
    assert len(launch.slots("auto")) == 2


def test_no_run_goes_on_without_its_parent(monkeypatch):
    parents, killed = [7, 7, 1], []
    monkeypatch.setattr(launch.os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(launch.os, "kill", lambda *signal: killed.append(signal))
    monkeypatch.setattr(launch, "WATCH_SECONDS", 0.0)
    launch._stop_without(7)
    assert (parents, killed) == ([], [(os.getpid(), signal.SIGTERM)])
