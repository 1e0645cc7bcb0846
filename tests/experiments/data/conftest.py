from __future__ import annotations

import multiprocessing

import pytest

from comrope.experiments.data.workers import start_server


@pytest.fixture(scope="session")
def server() -> None:
    """Wait for the server of loading processes: its imports take seconds, once a session."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()
