from __future__ import annotations

import os

import pytest
from support.jobs import TESTS


@pytest.fixture
def slurm(monkeypatch):
    """A machine with Slurm's commands."""
    monkeypatch.setattr("shutil.which", lambda name: name)


@pytest.fixture(autouse=True)
def _environment_of_jobs(monkeypatch):
    """One thread each; the tasks of these tests are importable."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
