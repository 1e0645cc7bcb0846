from __future__ import annotations

import os
import sys
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.images import make_folder


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


@pytest.fixture(scope="module")
def ucf(tmp_path_factory) -> Path:
    """UCF-101's layout: two classes, two training videos and one validation video each."""
    from support.videos import write_video  # it needs OpenCV

    root = tmp_path_factory.mktemp("ucf")
    for name in ("Emu", "Ant"):
        for k in range(3):
            write_video(root / "videos" / name / f"v_{name}_{k}.avi", 16)
    lists = {
        "classInd": "2 Ant\n1 Emu\n",
        "trainlist01": "Emu/v_Emu_0.avi 1\nAnt/v_Ant_0.avi 2\nAnt/v_Ant_1.avi 2\nEmu/v_Emu_1.avi 1",
        "testlist01": "Ant/v_Ant_2.avi\nEmu/v_Emu_2.avi\n",
    }
    (root / "splits").mkdir()
    for name, text in lists.items():
        (root / "splits" / f"{name}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def gesture5(tmp_path_factory) -> Path:
    archive = Path(os.environ.get("COMROPE_DATA") or "", "gesture5.tar")
    if not os.environ.get("COMROPE_DATA") or not archive.is_file():
        pytest.skip("COMROPE_DATA is not set, or has no gesture5.tar")
    out = tmp_path_factory.mktemp("gesture5")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return out / "gesture5"


@pytest.fixture
def command(monkeypatch, capfd) -> Callable[..., tuple[int, str]]:
    """The command ``comrope`` in this process: its exit code, and what it prints."""
    from comrope.experiments.cli import main

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["comrope", *map(str, arguments)])
        with warnings.catch_warnings(), pytest.raises(SystemExit) as left:
            main()
        said = capfd.readouterr()
        return int(left.value.code or 0), said.out + said.err

    return run
