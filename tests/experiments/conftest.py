from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.images import make_folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)


@pytest.fixture(scope="module")
def one_thread():
    """Models this small are slower on several, and far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
