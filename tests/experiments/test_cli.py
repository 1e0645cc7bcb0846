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
import torch

from comrope.experiments.inspect import angles_moved, ape_variation
from comrope.experiments.training.evaluate import load_run

TINY = (
    "model.name=vit_nano_patch4_12", "train.epochs=2", "train.batch_size=120",
    "evaluate.resolutions=12,24",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("default")


def comrope(*arguments: object, check: int = 0) -> str:
    """Standard output, or with another exit code standard error."""
    command = [sys.executable, "-m", "comrope", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == check, done.stderr[-3000:]
    return done.stdout if not check else done.stderr


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A small study of three methods and two seeds, which the tests below look at."""
    out = tmp_path_factory.mktemp("study")
    settings = ("--out", out, "--methods", "ape,liere,comrope-ld", "--seeds", 2, "--quiet")
    said = comrope("reproduce", "classification", *TINY, *settings)
    assert f"figure:  {out}/classification-ape-liere-comrope-ld-" in said
    return out


def runs(study: Path, start: str) -> list[Path]:
    return sorted((study / "runs").glob(f"{start}-*"))


def test_reproduce_writes_results_table_and_figure(study):
    (folder,) = study.glob("classification-ape-liere-comrope-ld-*")
    results = json.loads((folder / "results.json").read_text())
    assert [cell["method"] for cell in results["cells"]] == ["ape", "liere", "comrope-ld"]
    for cell in results["cells"]:
        for spread in cell["top1"].values():
            assert len(spread["values"]) == 2
            assert spread["mean"] == pytest.approx(sum(spread["values"]) / 2)
    table = (folder / "table.md").read_text()
    assert "on another data set (ImageNet-1K" in table
    assert "| ComRoPE-LD | 1 |" in table
    assert "65.49" in table  # the paper's
    assert (folder / "figure.png").stat().st_size > 30_000


def test_reproduce_runs_only_what_is_missing_and_loses_nothing(study):
    before = {p: p.stat().st_mtime_ns for p in study.rglob("runs/*/*") if p.is_file()}
    settings = ("--out", study, "--methods", "liere,comrope-ld", "--seeds", 1, "--quiet")
    comrope("reproduce", "perturbation", *TINY, "train.epochs=1", *settings[:2], "--methods",
            "comrope-ld", "--seeds", 1, "--quiet")  # fmt: skip
    said = comrope("reproduce", "offset", *TINY, *settings)
    after = {p: p.stat().st_mtime_ns for p in before}
    assert after == before
    assert "| ComRoPE-LD |" in said


def test_moving_the_image_moves_lieres_accuracy_only(study):
    settings = ("--out", study, "--methods", "liere,comrope-ld", "--seeds", 2, "--quiet")
    comrope("reproduce", "offset", *TINY, *settings)
    folder = max(study.glob("offset-liere-comrope-ld-*"), key=lambda p: p.stat().st_mtime)
    results = json.loads((folder / "results.json").read_text())
    for cell in results["cells"]:
        moved = [
            abs(run["offset"][rho] - run["offset"]["0"])
            for run in cell["runs"]
            for rho in run["offset"]
        ]
        if cell["method"] == "liere":
            assert max(moved) > 3
        else:
            assert max(moved) <= 0.1


def test_other_units_change_other_resolutions_only(study):
    settings = ("--out", study, "--methods", "liere,comrope-ld", "--seeds", 2, "--quiet")
    said = comrope("reproduce", "units", *TINY, *settings)
    (folder,) = study.glob("units-liere-comrope-ld-*")
    results = json.loads((folder / "results.json").read_text())
    for cell in results["cells"]:
        for run in cell["runs"]:
            assert len({by_size["12"] for by_size in run["units"].values()}) == 1
            assert run["units"]["0"] == run["top1"]
            assert run["units"]["1"]["24"] != run["units"]["0"]["24"]
        means = {s: (v["12"]["mean"] + v["24"]["mean"]) / 2 for s, v in cell["units"].items()}
        assert f"**{max(means.values()):.1f}" in said
    again = comrope("reproduce", "units", *TINY, *settings, "--gather")  # as they are: no data
    assert again.splitlines()[:12] == said.splitlines()[:12]


def test_frequencies_before_and_after_training(study):
    settings = ("--out", study, "--methods", "comrope-ld", "--quiet")
    said = comrope("reproduce", "angles", *TINY, *settings)
    (folder,) = study.glob("angles-comrope-ld-*")
    (cell,) = json.loads((folder / "results.json").read_text())["cells"]
    model = load_run(study / "runs" / cell["runs"][0]["run"])[1]
    for layer, block in enumerate(model.blocks):
        _, wanted = block.attn.rope.spectrum()
        found = torch.tensor(cell["runs"][0]["learned"][layer])
        torch.testing.assert_close(found, wanted.flatten(1), rtol=1e-3, atol=1e-3)
        assert cell["runs"][0]["start"][layer] != cell["runs"][0]["learned"][layer]
        assert f"| ComRoPE-LD | {layer} | " in said
    assert (folder / "figure.png").stat().st_size > 20_000


def test_every_layers_angles_move_and_ape_varies_along_both_axes(study):
    for method in ("liere", "comrope-ld"):
        config, model = load_run(runs(study, method)[0])
        moved = angles_moved(config, model)
        assert len(moved) == 3
        assert all(change > 1e-3 for change in moved.values()), moved
    _, model = load_run(runs(study, "ape")[0])
    assert all(share > 0.3 for share in ape_variation(model))


@pytest.mark.parametrize("method", ["ape", "liere", "comrope-ld"])
def test_inspect_draws(study, method, tmp_path):
    said = comrope("inspect", runs(study, method)[0], "--out", tmp_path)
    pictures = {p.name for p in tmp_path.glob("*.png")}
    if method == "ape":
        assert pictures == {"similarity.png"}
    else:
        names = ("similarity", "spectra", "commutators", "offset", "elements")
        assert pictures == {f"{name}.png" for name in names}
    assert str(tmp_path / "similarity.png") in said


def test_eval_at_other_resolutions_and_offsets(study, tmp_path):
    run = runs(study, "comrope-ld")[0]
    comrope("eval", run, "--resolutions", "12,36", "--offsets", "0,2", "--out", tmp_path / "e.json",
            "--quiet")  # fmt: skip
    found = json.loads((tmp_path / "e.json").read_text())
    assert [(e["resolution"], e["offset"]) for e in found] == [(12, 0), (12, 2), (36, 0), (36, 2)]
    trained = json.loads((run / "result.json").read_text())["top1"]["12"]
    assert found[0]["top1"] == pytest.approx(trained)
    assert found[1]["top1"] == pytest.approx(trained, abs=0.1)


def test_the_distribution_and_block_size_studies(tmp_path):
    settings = ("--out", tmp_path, "--methods", "comrope-ap", "--seeds", 1, "--quiet")
    said = comrope("reproduce", "distribution", *TINY, *settings)
    assert "| ComRoPE-AP | 4 |" in said
    assert "0.208" in said  # the paper's
    said = comrope("reproduce", "block-size", *TINY, *settings)
    assert all(f"| ComRoPE-AP | {block} | 1 |" in said for block in (2, 4, 8))
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_the_cost_tables_come_from_the_live_code(tmp_path):
    said = comrope("reproduce", "cost", "--out", tmp_path, "--quiet")
    results = json.loads((tmp_path / "cost" / "results.json").read_text())
    counted = {(row["method"], row["block_size"]): row for row in results["parameters"]}
    for row in counted.values():  # Tab. 5, ViT-B/16: n = 196, d = 768, L = 12, N = 2
        if row["expected"] is not None:
            assert row["parameters"] == row["expected"], row
    assert counted["ape", 8]["parameters"] == 196 * 768
    assert counted["liere", 8]["parameters"] == 12 * 2 * 768 * 8
    assert counted["comrope-ap", 4]["parameters"] == 12 * 768 * 4
    assert counted["comrope-ld", 8]["parameters"] == 12 * (768 * 8 + 768 * 2 // 8)
    times = {(row["method"], row["block_size"]): row for row in results["times"]}
    assert times["rope", 2]["train_ratio"] == 1
    assert all(row["error"] < 1e-3 for row in times.values() if row["error"] is not None)
    assert "1.25" in said  # the paper's ratio


def test_recipes_are_listed_and_shown_in_full():
    assert "imagenet" in comrope("recipes").split()
    said = comrope("recipes", "imagenet", "--method", "comrope-ap", "--perturbation", "0.5")
    for line in ("warmup_ratio: 0.02", "position: comrope-ap", "perturbation: 0.5"):
        assert line in said
    assert "train.epochs = 200" in comrope("recipes", "--fields")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digits", "train.epoch=3"), "train.epoch: no such field; did you mean"),
        (("train", "digit"), "recipe: no 'digit'; did you mean digits?"),
        (("train", "imagenette", "--data", "/nowhere"), "data.root: /nowhere does not exist"),
        (("eval", "/nowhere"), "run: /nowhere holds no run"),
        (("inspect", "/nowhere"), "run: /nowhere holds no run"),
        (("reproduce", "classify"), "name: expected one of classification"),
        (
            ("reproduce", "offset", "--preset", "huge"),
            "preset: expected one of demo, tiny, small, paper",
        ),
        (("reproduce", "classification", "--preset", "small"), "data.root: not given"),
        (
            ("reproduce", "offset", "--methods", "rotary"),
            "methods: expected some of rope, liere",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, message, tmp_path):
    out = () if arguments[0] in ("eval", "inspect") else ("--out", tmp_path / "run")
    said = comrope(*arguments, *out, check=2)
    assert message in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_write_that_fails_is_told_and_leaves_what_was_there(tmp_path):
    """A real one: files may not grow beyond 200 kB, and a checkpoint needs more."""
    out, few = tmp_path / "run", ("train.checkpoint_every=4", "train.log_every=1")
    command = [sys.executable, "-m", "comrope", "train", "digits", *TINY, *few, "--quiet"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "step-00000004 cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any((out / "checkpoints").iterdir())
    assert "run: " in comrope(*command[3:], "--out", out)


def test_sigterm_to_a_study_saves_the_runs_and_the_same_command_goes_on(tmp_path):
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
    assert "the same command continues" in said
    assert "Traceback" not in said
    assert list(logs.glob("*/checkpoints/step-*"))
    comrope(*arguments)
    assert list(tmp_path.glob("classification-ape-rope-*/table.md"))


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
