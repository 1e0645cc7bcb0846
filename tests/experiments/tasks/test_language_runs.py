"""Runs of language models: killed, of two processes, compiled, and through every command."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.runs import in_process, same, weights
from support.text import spoken

from comrope.experiments.config import CONFIG, to_yaml
from comrope.experiments.runs.directory import read_result
from comrope.experiments.runs.log import read_log
from comrope.experiments.training.train import train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_log(folder / "log.jsonl") if r["event"] == "train"]


def test_killed_at_random_moments_it_ends_with_the_same_weights(tmp_path):
    config = spoken(train__checkpoint_every=1, train__ema=0.9, data__workers=1)
    whole, folder, moments = tmp_path / "whole", tmp_path / "run", random.Random(0)
    for kill in range(4):
        process = in_process(config, folder)
        reached = 2 * kill
        while process.is_alive() and steps_in(folder) < reached:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    for out in (folder, whole):
        process = in_process(config, out)
        process.join()
        assert process.exitcode == 0
    assert same(weights(folder), weights(whole))
    assert losses(folder) == losses(whole)
    assert read_result(folder)["bits_per_byte"] == read_result(whole)["bits_per_byte"]


def steps_in(folder: Path) -> int:
    return max([0, *(int(path.name[5:]) for path in folder.glob("checkpoints/step-*"))])


def run(config, out: Path, processes: int) -> None:
    """Train in so many processes, as torchrun starts them."""
    recipe = out.with_suffix(".yaml")
    recipe.write_text(to_yaml(config))
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    launcher = torchrun if processes > 1 else ()
    command = ["-m", "comrope", "train", str(recipe), "--out", str(out), "--quiet"]
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(spoken(train__ema=0.9), folder, 1)
    return folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes_equal_one(strategy, parts, alone, tmp_path):
    """Also of an odd number of stretches, and with averaged weights."""
    out = tmp_path / "run"
    run(spoken(train__ema=0.9, train__strategy=strategy, train__accumulate=parts), out, 2)
    assert losses(out) == pytest.approx(losses(alone), abs=2e-5)
    mine, other = weights(out), weights(alone)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-2, atol=2e-3, msg=name)
    mine, other = read_result(out), read_result(alone)
    assert (mine["processes"], other["processes"]) == (2, 1)
    assert mine["corpus"] == other["corpus"]
    assert mine["sequences"] == other["sequences"]
    for view, bits in other["bits_per_byte"].items():
        assert mine["bits_per_byte"][view] == pytest.approx(bits, abs=1e-4)
        figures = [each["figures"][view]["bits_by_position"] for each in (mine, other)]
        assert figures[0] == pytest.approx(figures[1], abs=1e-3)


@pytest.mark.filterwarnings("default")
def test_a_compiled_run_has_the_losses_of_a_plain_one(alone, tmp_path):
    out = tmp_path / "run"
    train(spoken(train__ema=0.9, train__compile=True), out, progress=False)
    assert losses(out) == pytest.approx(losses(alone), abs=1e-3)


STUDY = """
from matplotlib.figure import Figure
from comrope.experiments.studies.study import Row, Scale, Study
from comrope.experiments.studies.tables import format_mean, markdown_table, row_name

def table(results):
    lines = [[row_name(row), format_mean(row["bits_per_byte"]["16"], 4)] for row in results["rows"]]
    return markdown_table(["method", "bits per byte"], lines)

STUDY = Study(
    name="bits",
    title="Bits per byte",
    task="language",
    scales={"demo": Scale("RECIPE", "bytes")},
    seeds=lambda preset: 2,
    rows=lambda preset: [Row("none", 0.0), Row("rope", 0.0), Row("rope-mixed", 0.0)],
    table=table,
    figure=lambda results: Figure(),
)
"""


def test_every_command(alone, tmp_path, command, monkeypatch):
    def succeeds(*arguments: object) -> str:
        code, said = command(*arguments)
        assert code == 0, said
        return said

    said = succeeds("eval", alone, "--resolutions", "16,24", "--out", tmp_path / "found", "--quiet")
    assert "16 tokens" in said
    found = {entry["view"]: entry for entry in json.loads((tmp_path / "found").read_text())}
    result = read_result(alone)
    assert found["16"]["bits_per_byte"] == pytest.approx(result["bits_per_byte"]["16"], abs=1e-6)
    succeeds("results", "add", alone, "--store", tmp_path / "results")
    assert (tmp_path / "results" / "language.jsonl").is_file()
    said = succeeds("inspect", alone, "--out", tmp_path / "inspect")
    assert "blocks.0" in said
    facts = json.loads((tmp_path / "inspect" / "inspect.json").read_text())
    assert all(layer["offset_sensitivity"] < 1e-2 for layer in facts["layers"])
    assert {Path(name).name for name in facts["pictures"]} == {
        "similarity.png", "spectra.png", "commutators.png", "offset.png", "elements.png"
    }  # fmt: skip
    succeeds("export", alone, "--to", "safetensors", "--out", tmp_path / "model")
    assert json.loads((tmp_path / "model" / "preprocessing.json").read_text())["end"] == 256
    succeeds("export", alone, "--to", "torch-export", "--out", tmp_path / "model.pt2")

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").touch()
    text = STUDY.replace("RECIPE", str(alone / CONFIG))
    (tmp_path / "elsewhere" / "study.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("comrope.experiments.launch.slots", lambda *_: [None])
    out = tmp_path / "out"
    said = succeeds("reproduce", "elsewhere.study:STUDY", "--out", out, "--quiet")
    assert "| no positions |" in said
    rows = json.loads((out / "bits" / "results.json").read_text())["rows"]
    assert [len(row["runs"]) for row in rows] == [2, 2, 2]
    gathered = succeeds("reproduce", "elsewhere.study:STUDY", "--out", out, "--quiet", "--gather")
    assert said.splitlines()[:8] == gathered.splitlines()[:8]
