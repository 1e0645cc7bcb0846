"""``comrope bench`` as a command: what it is asked, what it refuses, what it keeps when stopped."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from support.benches import TINY, command, fake, fake_part

from comrope.experiments.bench import parity, suites
from comrope.experiments.bench.cases import Setting
from comrope.experiments.bench.runner import Benchmark, Candidate, Part
from comrope.experiments.common.errors import Interrupted

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rotations",), "suites: expected one of all, rotation, attention"),
        (("--device", "tpu"), "device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        (("--device", "cuda:99"), "device: this machine has"),
        (("--dtype", "int8"), "dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        (("--preset", "huge"), "preset: expected one of small, full, got 'huge'"),
        (("--rounds", "0"), "rounds: expected at least 1, got 0"),
        (("--batch", "0"), "batch: expected at least 1, got 0"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, message, monkeypatch, tmp_path, capfd):
    assert command(monkeypatch, *arguments, "--out", tmp_path / "out") == 2
    said = capfd.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_some_rows_beside_the_yardstick(monkeypatch, tmp_path, capfd):
    part = fake_part(fake("none"), fake("ours"), fake("theirs"), fake("others"))
    monkeypatch.setitem(suites.SUITES, "rotation", (lambda setting: part,))
    run = ("rotation", "--device", "cpu", "--out", tmp_path)
    assert command(monkeypatch, *run, "--only", "our", "--only", "others") == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["none", "ours", "others"]
    assert command(monkeypatch, *run, "--only", "nobody") == 2
    assert "only: no row's name contains nobody" in capfd.readouterr().err


def test_an_interruption_keeps_what_was_timed(monkeypatch, tmp_path):
    def stopped() -> Benchmark:
        os.kill(os.getpid(), signal.SIGTERM)
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
    with pytest.raises(Interrupted, match="rotation: stopped; what was timed is in"):
        suites.bench(["rotation", "vit"], TINY, tmp_path, progress=False)
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
    assert parity.watched_samples(128) == [0, 64, 127]
