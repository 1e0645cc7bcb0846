"""One process or several: sums, shares and gradients; and whole runs of two processes (slow)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.runs import weights
from torch import nn

from comrope.experiments.common import distributed
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError

SETTINGS = (
    "digits", "--quiet", "model.name=vit_nano_patch4_12", "train.epochs=1", "train.batch_size=96",
    "train.log_every=1", "train.checkpoint_every=3", "train.perturbation_per=sample",
    "train.ema=0.9", "evaluate.resolutions=12,24", "evaluate.batch_size=64",
)  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


# One process


def test_one_process_has_the_model_as_it_is():
    accelerator, model = create_accelerator("cpu"), nn.Linear(2, 2)
    assert accelerator.num_processes == 1
    for strategy in ("ddp", "fsdp2"):
        assert distributed.distribute(model, strategy, accelerator) is model
    assert distributed.unwrap(model) is model
    assert distributed.broadcast(accelerator, {"a": 1}) == {"a": 1}
    assert distributed.sum_over_processes(accelerator, 1, torch.tensor(2.5)) == [1.0, 2.5]
    with distributed.accumulating(model, last=False):
        pass
    distributed.reshard(model)


def test_gathered_tensors_are_copies():
    tensor = torch.ones(2, requires_grad=True)
    found = distributed.gather_state({"w": tensor})["w"]
    with torch.no_grad():
        tensor.zero_()
    assert found.tolist() == [1, 1]
    assert not found.requires_grad
    assert distributed.gather_state({"w": tensor}, keep=False) == {}
    assert distributed.shard_like(found, tensor) is found


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_has_the_precision_of_the_run(precision, dtype):
    with distributed.autocast(precision, torch.device("cpu")):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_processes_that_do_not_find_each_other_are_an_error(monkeypatch):
    create_accelerator("cpu")  # the state that later ones share is of one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2"):
        create_accelerator("cpu")


# Several processes


def command(out: Path, *settings: str, processes: int = 1, launch: tuple[str, ...] = ()):
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    launcher = (*torchrun, *launch) if processes > 1 else ()
    return [sys.executable, *launcher, "-m", "comrope", "train", *SETTINGS, *settings,
            "--out", str(out)]  # fmt: skip


def run(out: Path, *settings: str, processes: int = 1) -> None:
    done = subprocess.run(
        command(out, *settings, processes=processes),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def losses(out: Path) -> list[float]:
    records = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "train"]


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("train.strategy=ddp",),
        ("train.strategy=fsdp2",),
        ("train.strategy=fsdp2", "train.accumulate=2"),
    ],
    ids=["ddp", "fsdp2", "fsdp2-accumulated"],
)  # fmt: skip
def test_two_processes_have_the_loss_curve_of_one(settings, alone, tmp_path):
    run(tmp_path / "run", *settings, processes=2)
    ours, theirs = losses(tmp_path / "run"), losses(alone)
    assert len(ours) == len(theirs) == 14
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert ours[-1] < ours[0]
    mine, other = weights(tmp_path / "run"), weights(alone)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-2, atol=2e-3, msg=name)
    mine, other = result(tmp_path / "run"), result(alone)
    assert mine["processes"] == 2
    assert mine["images"] == other["images"] == 360
    for resolution, top1 in other["top1"].items():
        assert mine["top1"][resolution] == pytest.approx(top1, abs=0.6)


@pytest.mark.slow
def test_what_one_process_left_two_go_on_with(alone, tmp_path):
    """A checkpoint belongs to no number of processes and to no strategy."""
    folder = tmp_path / "run"
    run(folder)
    for name in ("result.json", "model.safetensors"):
        (folder / name).unlink()
    newest = max((folder / "checkpoints").iterdir())
    assert newest.name == "step-00000014"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    run(folder, "train.strategy=fsdp2", processes=2)
    assert losses(folder) == pytest.approx(losses(alone), abs=2e-5)


@pytest.mark.slow
def test_processes_find_each_other_where_there_is_no_gpu(alone, tmp_path):
    run(tmp_path / "run", "train.device=auto", processes=2)
    assert result(tmp_path / "run")["processes"] == 2


@pytest.mark.slow
def test_a_folder_that_not_every_process_sees_is_refused(alone, tmp_path):
    """Each process in a working folder of its own, as on nodes with disks of their own."""
    script = tmp_path / "private.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from comrope.experiments.config import load_recipe\n"
        "from comrope.experiments.training.train import train\n"
        "out = Path(sys.argv[1], os.environ['RANK'])\n"
        "config = load_recipe(sys.argv[2])\n"
        "train(config, out, progress=False)\n"
    )
    part = tmp_path / "run" / "0"
    shutil.copytree(alone, part)
    for name in ("result.json", "model.safetensors"):
        (part / name).unlink()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(part.parent), str(alone / "config.yaml")],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "out: not every process can read the checkpoints" in done.stderr


@pytest.mark.slow
def test_max_restarts_recovers_from_a_killed_worker(alone, tmp_path):
    folder = tmp_path / "run"
    output = tmp_path / "output"
    with output.open("w") as stream:
        launcher = subprocess.Popen(
            command(folder, processes=2, launch=("--max-restarts=2",)),
            env=ENVIRONMENT, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    try:
        launcher.wait(timeout=120)
    finally:
        launcher.terminate()  # if it hangs: no process outlives a test that fails
        launcher.wait(timeout=60)
    assert launcher.returncode == 0, output.read_text()[-3000:]
    events = [json.loads(line)["event"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert "resumed" in events
    assert losses(folder) == pytest.approx(losses(alone), abs=2e-5)
