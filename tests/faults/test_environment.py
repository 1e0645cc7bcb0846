"""Closed streams, full disks, long folders and other locales: a command works, or says why not."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.faults import ENVIRONMENT, raises_line, refused
from support.images import picture, write_folder
from support.runs import same, weights
from support.toy import curve

from comrope.experiments.config import to_yaml
from comrope.experiments.data import workers

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(
    *arguments: object,
    before: str = ":",
    redirections: str = "",
    cwd: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess:
    """A command with the redirections of a shell."""
    command = f'{before}; exec "$0" -m comrope "$@" {redirections}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *map(str, arguments)],
        cwd=cwd, env=os.environ | ENVIRONMENT | environment,
        capture_output=True, check=False, timeout=600,
    )  # fmt: skip


# Streams


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends_first_is_no_error(unbuffered):
    """As in ``comrope recipes | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "comrope", "recipes", "--fields"],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    done = shell("recipes", redirections=">/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith(b"comrope: standard output cannot be written (")
    assert done.stderr.count(b"\n") == 1
    assert shell("recipes", "nosuch", redirections="2>/dev/full").returncode == 2


# Folders for temporary files


@pytest.fixture
def long(tmp_path, monkeypatch) -> Path:
    """A folder for temporary files whose name is too long for sockets."""
    folder = tmp_path / ("x" * 130)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    return folder


def test_sockets_have_short_names(long):
    workers._choose_socket_folder()
    folder = multiprocessing.util.get_temp_dir()
    assert len(folder) <= workers.LONGEST
    assert tempfile.gettempdir() == str(long)  # other files stay there


def test_without_a_short_folder_the_long_one_is_named(long, monkeypatch):
    monkeypatch.setattr(workers, "SHORT", ("/nowhere",))
    with raises_line("TMPDIR: ", long, "data.workers=0"):
        workers._choose_socket_folder()


@pytest.mark.slow
def test_a_run_on_a_bare_machine(stopped, tmp_path):
    """No streams, no home, few open files, a long folder for temporary files, an unusual name."""
    long, out = tmp_path / ("x" * 130), tmp_path / "a run, “ä”"
    long.mkdir()
    recipe = tmp_path / "curve.yaml"
    recipe.write_text(to_yaml(curve(train__checkpoint_every=5, data__workers=1)))
    done = shell(
        "train", recipe, "--out", out, "--quiet",
        before="ulimit -n 64; unset XDG_CACHE_HOME", redirections="<&- >&- 2>&-",
        TMPDIR=str(long), HOME="/nowhere", TERM="dumb", PYTHONHASHSEED="1",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert same(weights(out), stopped[1])
    assert json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert not list(long.glob("pymp-*"))


# Folders of runs

NO_FOLDERS = (
    "/dev/null",
    "/dev/full",
    "/dev/null/x",
    "/etc/passwd/x",
    "/proc/x",
    "/sys/x",
    "x" * 300,
)


@pytest.mark.parametrize("out", NO_FOLDERS, ids=lambda out: out[:20])
def test_a_folder_that_cannot_be_made_is_named(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "curve.yaml").write_text(to_yaml(curve()))
    refused(out[:20], "train", "curve.yaml", "--out", out, "--quiet")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.yaml"]


# Locales


@pytest.mark.slow
def test_names_in_recipes_and_folders_are_utf_8_in_any_locale(tmp_path):
    """A recipe names a folder, and folders name classes, which a result lists."""
    root = write_folder(tmp_path / "dätä", {"ü.png": picture()})
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "café")
    (tmp_path / "é.yaml").write_text(
        "base: digits\ndata: {name: folder, root: dätä, num_classes: 2}\n"
        "model: {name: vit_nano_patch4_12}\nevaluate: {resolutions: [12]}\n"
        "train: {epochs: 1, batch_size: 3}\n",
        encoding="utf-8",
    )
    done = shell("train", "é.yaml", "--out", "é/run", "--quiet", cwd=tmp_path, **ASCII)
    assert (done.returncode, done.stdout.decode().splitlines()[-1]) == (0, "run: é/run")
    result = json.loads((tmp_path / "é" / "run" / "result.json").read_text())
    assert (result["data_root"], result["classes"]) == ("dätä", ["café", "dog"])
    done = shell("eval", "é/run", "--quiet", "--out", "é.json", cwd=tmp_path, **ASCII)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "é.json").is_file()
