"""Jobs of this machine: runs of seconds that can be interrupted, and their processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from comrope.experiments.launch import Run

TESTS = Path(__file__).parents[1]


def job_file(run: Run) -> dict[str, str]:
    return json.loads((run.folder / ".cluster" / "job.json").read_text())


def processes_of(run: Run) -> list[psutil.Process]:
    """The processes that train a run; their parent is submitit's."""
    return psutil.Process(int(job_file(run)["id"])).children()


def submissions(run: Run) -> int:
    return len(list((run.folder / ".cluster").glob("*_submitted.pkl")))


def wait_for(found: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def events(folder: Path) -> list[str]:
    """What the log of a run has by now."""
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["event"] for line in lines if line.endswith("}")]
