"""A kind of data and a study outside of comrope, from the command line: train, eval, reproduce."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.outside import CHANCE, RECIPE, STUDY, TASK


@pytest.fixture
def comrope(tmp_path):
    """The command, where the package ``elsewhere`` is importable."""
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "task.py").write_text(TASK)
    (package / "study.py").write_text(STUDY)
    (package / "recall.yaml").write_text(RECIPE)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "comrope", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done

    return run


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


@pytest.mark.slow
def test_a_task_and_a_study_outside_are_trained_evaluated_and_reproduced(comrope, tmp_path):
    recipe = "elsewhere/recall.yaml"
    said = comrope("train", recipe, "options.offset=2", "--out", "run", "--quiet").stdout
    found = result_of(tmp_path / "run")
    assert found["recalled"]["all"] > 90
    assert found["sequences"] == 450
    assert f"{found['recalled']['all']:.2f} %" in said

    comrope("eval", "run", "--out", "found.json", "--quiet")
    (entry,) = json.loads((tmp_path / "found.json").read_text())
    assert entry["recalled"] == found["recalled"]["all"]
    comrope("eval", "run", "options.offset=5", "--out", "found.json", "--quiet")
    (other,) = json.loads((tmp_path / "found.json").read_text())
    assert other["recalled"] < 2 * CHANCE  # what it learned is an offset
    assert comrope("eval", "run", "--offsets", "1", code=2).stderr.startswith("comrope: offsets: ")

    said = comrope("reproduce", "elsewhere.study:STUDY", "--out", "out", "--quiet").stdout
    folder = tmp_path / "out" / "recall"
    results = json.loads((folder / "results.json").read_text())
    without, ours = (row["recalled"]["all"]["mean"] for row in results["rows"])
    assert without < 3 * CHANCE
    assert ours > 90
    assert f"| ComRoPE-LD | {ours:.2f} |" in said
    assert said.startswith((folder / "table.md").read_text())
    assert (folder / "figure.png").stat().st_size > 5000
