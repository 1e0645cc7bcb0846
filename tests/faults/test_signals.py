"""Ctrl-C and SIGTERM at any moment of a command: one line and an exit code, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.faults import ENVIRONMENT
from support.toy import curve

from comrope.experiments.config import to_yaml

INT, TERM = signal.SIGINT, signal.SIGTERM
STOPPED = "comrope: stopped\n"
SAVED = "comrope: {out}: stopped at step 1, saved; the same command continues\n"
EVALUATING = "comrope: {out}: stopped in evaluation; the same command continues\n"


@contextmanager
def started(*arguments: object, **environment: str) -> Iterator[subprocess.Popen]:
    """A command, and a group of its processes, as a terminal has them."""
    process = subprocess.Popen(
        [sys.executable, "-m", "comrope", *map(str, arguments)],
        env=os.environ | ENVIRONMENT | environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        for one in psutil.process_iter():  # no process outlives a test that fails
            if os.getpgid(one.pid) == process.pid:
                one.kill()
        process.communicate()


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_during_imports_is_one_line(tmp_path):
    """Those of torch take the longest, and C code would replace the exception."""
    with started("train", "digits", "--out", tmp_path / "run") as process:
        maps = Path(f"/proc/{process.pid}/maps")
        if not maps.exists():
            pytest.skip("needs /proc")
        wait_for(lambda: "libtorch" in maps.read_text(), process)
        os.killpg(process.pid, INT)
        printed = process.communicate(timeout=60)[1]
    assert (process.returncode, printed) == (130, STOPPED)
    assert not (tmp_path / "run").exists()


# Where a run is, the signals that come there, the exit code and the line.
MOMENTS = [
    ("start", [INT], 130, STOPPED),
    ("step", [INT], 130, SAVED),
    ("step", [INT, INT], 130, STOPPED),
    ("step", [TERM, TERM], 143, SAVED),
    ("library", [INT, INT], 130, STOPPED),  # that replaces the exception
    ("evaluation", [INT], 130, EVALUATING),
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "numbers", "code", "line"), MOMENTS)
def test_a_run_stops_with_one_line(place, numbers, code, line, tmp_path):
    out, note, recipe = tmp_path / "run", tmp_path / "note", tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(curve(task="support.waiting:Waiting")))
    place = {"PLACE": place, "NOTE": str(note), "SECONDS": "1"}
    with started("train", recipe, "--out", out, "--quiet", **place) as process:
        wait_for(note.exists, process)
        for number in numbers:
            time.sleep(0.2)
            os.killpg(process.pid, number)
        printed = process.communicate(timeout=60)[1]
    assert printed == line.format(out=out)
    assert process.returncode == code


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize(("when", "times"), [("start", 1), ("training", 2)])
def test_a_study_stops_with_one_line(when, times, tmp_path):
    arguments = (
        "reproduce", "classification", "model.name=vit_nano_patch4_12", "train.epochs=1000",
        "train.log_every=1", "evaluate.resolutions=12", "--methods", "ape,rope", "--seeds", "1",
        "--quiet", "--out", tmp_path,
    )  # fmt: skip
    with started(*arguments) as process:
        main = psutil.Process(process.pid)
        if when == "start":  # its processes are still busy with imports
            wait_for(lambda: "spawn_main" in str([p.cmdline() for p in main.children()]), process)
        else:
            wait_for(lambda: len(list(tmp_path.glob("runs/*/log.jsonl"))) == 2, process)
        children = main.children(recursive=True)
        for _ in range(times):
            os.killpg(process.pid, INT)
            time.sleep(0.02)
        printed = process.communicate(timeout=60)[1]
        assert psutil.wait_procs(children, timeout=30)[1] == []
    assert printed.startswith("comrope: stopped")
    assert printed.count("\n") == 1
    assert process.returncode == 130
