from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.vits import nano


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    torch.manual_seed(0)
    nano().save_pretrained(folder)
    return folder


@pytest.fixture
def saved(original, tmp_path) -> Path:
    """A saved model to be spoilt."""
    return Path(shutil.copytree(original, tmp_path / "model"))
