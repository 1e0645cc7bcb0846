from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.faults import copy_of
from support.runs import stop_after, tiny, weights
from support.toy import curve

from comrope.experiments.config import Config
from comrope.experiments.training.train import train


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Models this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> Config:
    return tiny(train__epochs=1, train__keep=1)


@pytest.fixture(scope="session")
def trained(digits, tmp_path_factory) -> Path:
    """A finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(digits, folder, progress=False)
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of it."""
    return copy_of(trained, tmp_path / "run")


@pytest.fixture(scope="session")
def stopped(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run that stopped after step 10 of 16, and the weights of one that did not."""
    folder = tmp_path_factory.mktemp("stopped")
    config = curve(train__checkpoint_every=5)
    train(config, folder / "whole", progress=False)
    stop_after(10, config, folder / "run")
    return folder / "run", weights(folder / "whole")
