"""``comrope bench``: what it runs, what it refuses, what it keeps when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from support.benches import TINY, command, fake, fake_part

from comrope.experiments.bench import suites
from comrope.experiments.bench.cases import Setting
from comrope.experiments.bench.runner import Benchmark, Candidate, Part
from comrope.experiments.common.errors import Interrupted

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (("rotations",), "suites"),
        (("--device", "tpu"), "device"),
        (("--device", "cuda:99"), "device"),
        (("--dtype", "int8"), "dtype"),
        (("--preset", "huge"), "preset"),
        (("--rounds", "0"), "rounds"),
        (("--batch", "0"), "batch"),
    ],
)
def test_mistakes_are_one_line(arguments, argument, monkeypatch, tmp_path, capfd):
    assert command(monkeypatch, *arguments, "--out", tmp_path / "out") == 2
    said = capfd.readouterr().err
    assert said.startswith(f"comrope: {argument}: ")
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_results_and_a_figure_are_written(monkeypatch, tmp_path, capfd):
    parts = {name: fake_part(fake("none"), fake("ours"), suite=name) for name in ("vit", "liere")}
    for name, part in parts.items():
        monkeypatch.setitem(suites.SUITES, name, (lambda setting, part=part: part,))
    results = suites.bench(["liere", "vit"], TINY, tmp_path, preset="tiny", progress=False)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert results["suites"] == list(results["finished"]) == ["vit", "liere"]  # in our order
    assert results["setting"]["grid"] == [2, 2]
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "ours" in capfd.readouterr().out


def test_a_wrong_candidate_makes_the_exit_code_1(monkeypatch, tmp_path, capfd):
    part = fake_part(fake("none"), fake("wrong", error=1.0))
    monkeypatch.setitem(suites.SUITES, "rotation", (lambda setting: part,))
    run = ("rotation", "--device", "cpu", "--rounds", 1, "--out", tmp_path)
    assert command(monkeypatch, *run) == 1
    said = capfd.readouterr()
    assert "1.0e+00" in said.out
    assert "1 " in said.err
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == 1
    assert [row["status"] for row in results["rows"]] == ["timed", "parity failed"]


def test_some_rows_beside_the_reference_row(monkeypatch, tmp_path, capfd):
    part = fake_part(fake("none"), fake("ours"), fake("theirs"), fake("others"))
    monkeypatch.setitem(suites.SUITES, "rotation", (lambda setting: part,))
    run = ("rotation", "--device", "cpu", "--out", tmp_path)
    assert command(monkeypatch, *run, "--only", "our", "--only", "others") == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["none", "ours", "others"]
    assert command(monkeypatch, *run, "--only", "nobody") == 2
    assert "comrope: only: " in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_keeps_what_was_timed(number, monkeypatch, tmp_path):
    def stopped() -> Benchmark:
        os.kill(os.getpid(), number)
        time.sleep(10)
        raise AssertionError

    part = fake_part(
        fake("none"),
        fake("none", compiled=True),
        fake("first", compiled=True),
        Candidate("second", stopped, method="rope", compiled=True),
        fake("third", compiled=True),
    )
    monkeypatch.setitem(suites.SUITES, "rotation", (lambda setting: part,))
    with pytest.raises(Interrupted, match=str(tmp_path)) as caught:
        suites.bench(["rotation", "vit"], TINY, tmp_path, progress=False)
    assert caught.value.number == number
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["finished"] == {}
    assert [(row["name"], row["compiled"]) for row in results["rows"]] == [
        ("none", False), ("none", True), ("first", True),
    ]  # fmt: skip
    assert results["rows"][2]["measures"]["forward"]["of"]["none"] > 0


def test_an_interruption_keeps_the_finished_suites(monkeypatch, tmp_path):
    def interrupt(setting: Setting) -> Part:
        raise KeyboardInterrupt

    part = fake_part(fake("none"), fake("ours"))
    monkeypatch.setitem(suites.SUITES, "rotation", (lambda setting: part,))
    monkeypatch.setitem(suites.SUITES, "vit", (interrupt,))
    assert command(monkeypatch, "rotation", "vit", "--device", "cpu", "--out", tmp_path) == 130
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["suites"] == ["rotation", "vit"]
    assert list(results["finished"]) == ["rotation"]
    assert [row["status"] for row in results["rows"]] == ["timed", "timed"]


def test_the_usual_dtype_is_one_that_the_device_is_made_for():
    assert suites.setting_of("small", device="cpu").dtype == torch.float32
    assert suites.setting_of("full", device="cpu").compile
    assert not suites.setting_of("full", device="cpu", compiled=False).compile


def test_a_gpu_has_a_number(monkeypatch):
    """What torch.cuda.set_device asks for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name in ("auto", "cuda"):
        assert suites.setting_of(device=name).device == torch.device("cuda:1")
    assert suites.setting_of(device="cuda:0").device == torch.device("cuda:0")


@pytest.mark.parametrize("preset", suites.PRESETS)
def test_every_preset_is_complete(preset):
    assert suites.setting_of(preset, device="cpu").batch > 0
