"""Standard streams that are closed, full, or have no reader, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comrope.experiments.common import streams

CONNECT = "import os, sys, faulthandler\nfrom comrope.experiments.common import streams\n"
CONNECT += "streams.connect()\n"


def shell(code: str, redirections: str = "", **environment: str) -> subprocess.CompletedProcess:
    """A process with the redirections of a shell."""
    command = f'exec "$0" -c "$1" {redirections}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, CONNECT + code],
        capture_output=True, env=os.environ | environment, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device(closed, tmp_path):
    """Otherwise the next file would get the number, and what libraries in C print."""
    code = f"""
faulthandler.enable()
print("lost"), print("lost", file=sys.stderr, flush=True)
with open({str(tmp_path / "file")!r}, "w") as file:
    assert file.fileno() > 2
    os.system("echo lost; echo lost >&2")
    os.write(2, b"lost")
sys.exit(7)
"""
    done = shell(code, closed)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_has_no_reader_is_lost(name, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    code = f"for _ in range(3):\n    print('x' * 100_000, file=sys.{name}, flush=True)\nsys.exit(7)"
    done = subprocess.run(
        [sys.executable, "-c", CONNECT + code], check=False, timeout=60,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, name: writer},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (7, b"", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_an_error_of_stdout_only(unbuffered):
    code = """
print("lost", file=sys.stderr, flush=True)
try:
    print("lost", flush=True)
except OSError as error:
    assert "standard output" in str(error)
    sys.exit(7)
"""
    done = shell(code, ">/dev/full 2>/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 7


def test_characters_that_a_stream_does_not_have_are_escaped():
    code = "print('\\xe9\\udcff\\u2013')\nprint('\\xe9', file=sys.stderr)"
    done = shell(code, PYTHONIOENCODING="ascii")
    assert (done.stdout, done.stderr) == (b"\\xe9\\udcff\\u2013\n", b"\\xe9\n")


def test_streams_that_a_program_replaced_stay(monkeypatch, capsys):
    before = sys.stdout, sys.stderr
    streams.connect()
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("option", [{"PYTHONUTF8": "0"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}])
def test_names_of_files_are_utf_8_in_any_locale(option, tmp_path):
    (tmp_path / "é").write_text("")
    code = (
        "from comrope.experiments.common import streams\nimport sys\nfrom pathlib import Path\n"
        "streams.use_utf8()\nassert Path(sys.argv[1], chr(233)).exists()\nprint(sys.argv[2:])"
    )
    environment = os.environ | {"PYTHONCOERCECLOCALE": "0", **option}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, "ü", b"\xff", ""],
        capture_output=True, env=environment, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.decode() == "['ü', '\\udcff', '']\n", done.stderr
