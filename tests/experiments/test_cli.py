"""The commands, as a user gives them: what they print, what they write, what they refuse."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.toy import curve

from comrope.experiments.common.errors import Interrupted
from comrope.experiments.config import to_yaml

TINY = (
    "model.name=vit_nano_patch4_12", "train.epochs=2", "train.batch_size=120",
    "evaluate.resolutions=12,24",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("default")


def comrope(*arguments: object, check: int = 0) -> str:
    """A process of its own: standard output, or with another exit code standard error."""
    command = [sys.executable, "-m", "comrope", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == check, done.stderr[-3000:]
    return done.stdout if not check else done.stderr


# Commands in this process


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A run of a second."""
    path = tmp_path / "curve.yaml"
    path.write_text(to_yaml(curve()))
    return path


def test_a_run_is_trained_and_evaluated(command, recipe, tmp_path):
    out = tmp_path / "run"
    code, said = command("train", recipe, "train.epochs=1", "--out", out, "--quiet")
    error = json.loads((out / "result.json").read_text())["error"]["all"]
    assert code == 0
    assert f"{error:.2f} ‰" in said
    assert said.splitlines()[-1] == f"run: {out}"
    again = command("eval", out, "--out", tmp_path / "found.json", "--quiet")
    assert again == (0, said.rpartition("run: ")[0])
    assert json.loads((tmp_path / "found.json").read_text())[0]["error"] == error


def test_recipes_are_listed_and_shown_in_full(command):
    assert "imagenet" in command("recipes")[1].split()
    _, said = command("recipes", "imagenet", "--method", "comrope-ap", "--perturbation", "0.5")
    for line in ("warmup_ratio: 0.02", "position: comrope-ap", "perturbation: 0.5"):
        assert line in said
    assert "train.epochs = 200" in command("recipes", "--fields")[1]


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (("train", "digits", "train.epoch=3"), "train.epoch"),
        (("train", "digit"), "recipe"),
        (("train", "imagenette", "--data", "/nowhere"), "data.root"),
        (("eval", "/nowhere"), "run"),
        (("eval", "/nowhere", "--offsets", "0,much"), "--offsets"),
        (("inspect", "/nowhere"), "run"),
        (("reproduce", "classify"), "name"),
        (("reproduce", "offset", "--preset", "huge"), "preset"),
        (("reproduce", "classification", "--preset", "small"), "data.root"),
        (("reproduce", "offset", "--methods", "rotary"), "methods"),
    ],
)
def test_mistakes_are_one_line(arguments, argument, command, tmp_path):
    out = () if arguments[0] in ("eval", "inspect") else ("--out", tmp_path / "run")
    code, said = command(*arguments, *out)
    assert code == 2
    assert said.startswith(f"comrope: {argument}: ")
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (Interrupted("saved", signal.SIGINT), 130),
        (Interrupted("saved"), 143),
        (ModuleNotFoundError(name="cv2"), 2),
        (OSError(28, "No space left"), 2),
        (UnicodeEncodeError("utf-8", "a\udce9", 1, 2, "no"), 2),
    ],
)
def test_what_stops_a_command_is_one_line(error, code, command, recipe, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("comrope.experiments.training.train.train", fail)
    found, said = command("train", recipe, "--out", tmp_path / "run")
    assert found == code
    assert said.startswith("comrope: ")
    assert len(said.strip().splitlines()) == 1
    assert (getattr(error, "name", None) or "") in said


# Processes


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_torch(option):
    code = (
        "import contextlib, sys\n"
        "from comrope.experiments.cli import main\n"
        f"sys.argv = ['comrope', {option!r}]\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "comrope" in done.stdout


def test_the_module_is_the_command():
    said = comrope("train", "digit", check=2)
    assert said.startswith("comrope: recipe: ")
    assert len(said.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_write_that_fails_is_one_line_and_what_was_there_stays(tmp_path):
    """A real one: files may not grow beyond 200 kB, and a checkpoint needs more."""
    out, few = tmp_path / "run", ("train.checkpoint_every=4", "train.log_every=1")
    command = [sys.executable, "-m", "comrope", "train", "digits", *TINY, *few, "--quiet"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "step-00000004" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any((out / "checkpoints").iterdir())
    assert "run: " in comrope(*command[3:], "--out", out)


@pytest.mark.slow
def test_sigterm_to_a_study_saves_the_runs_and_the_same_command_continues(tmp_path):
    arguments = ("reproduce", "classification", "model.name=vit_nano_patch4_12", "train.epochs=8",
                 "train.log_every=1", "evaluate.resolutions=12", "--methods", "ape,rope",
                 "--seeds", "1", "--quiet", "--out", str(tmp_path))  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "comrope", *arguments], stderr=subprocess.PIPE, text=True
    )
    logs = tmp_path / "runs"
    deadline = time.monotonic() + 120
    while len(list(logs.glob("*/log.jsonl"))) < min(2, os.cpu_count() or 1):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert list(logs.glob("*/checkpoints/step-*"))
    comrope(*arguments)
    assert list(tmp_path.glob("classification-ape-rope-*/table.md"))


# A study from the first run to its table


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A small study of three methods and two seeds, whose runs the tests below share."""
    out = tmp_path_factory.mktemp("study")
    settings = ("--out", out, "--methods", "ape,liere,comrope-ld", "--seeds", 2, "--quiet")
    said = comrope("reproduce", "classification", *TINY, *settings)
    assert f"figure:  {out}/classification-ape-liere-comrope-ld-" in said
    return out


@pytest.mark.slow
def test_reproduce_writes_results_table_and_figure(study):
    (folder,) = study.glob("classification-ape-liere-comrope-ld-*")
    results = json.loads((folder / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == ["ape", "liere", "comrope-ld"]
    for row in results["rows"]:
        for spread in row["top1"].values():
            assert len(spread["values"]) == 2
            assert spread["mean"] == pytest.approx(sum(spread["values"]) / 2)
    table = (folder / "table.md").read_text()
    assert "| ComRoPE-LD | 1 |" in table
    assert "65.49" in table  # the paper's
    assert (folder / "figure.png").stat().st_size > 30_000


@pytest.mark.slow
def test_moving_the_image_moves_lieres_accuracy_only_and_trains_nothing(study):
    before = {p: p.stat().st_mtime_ns for p in study.rglob("runs/*/*") if p.is_file()}
    settings = ("--out", study, "--methods", "liere,comrope-ld", "--seeds", 2, "--quiet")
    comrope("reproduce", "offset", *TINY, *settings)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    folder = max(study.glob("offset-liere-comrope-ld-*"), key=lambda p: p.stat().st_mtime)
    results = json.loads((folder / "results.json").read_text())
    for row in results["rows"]:
        moved = [
            abs(run["offset"][rho] - run["offset"]["0"])
            for run in row["runs"]
            for rho in run["offset"]
        ]
        if row["method"] == "liere":
            assert max(moved) > 3
        else:
            assert max(moved) <= 0.3


@pytest.mark.slow
def test_inspect_prints_a_line_a_layer_and_its_pictures(study, tmp_path):
    (run, *_) = sorted((study / "runs").glob("comrope-ld-*"))
    said = comrope("inspect", run, "--out", tmp_path)
    assert sum(line.startswith("blocks.") for line in said.splitlines()) == 3
    assert str(tmp_path / "similarity.png") in said
