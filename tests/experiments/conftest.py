from __future__ import annotations

from pathlib import Path

import pytest

from experiments.images import make_folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)
