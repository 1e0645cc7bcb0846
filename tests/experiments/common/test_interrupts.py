"""Ctrl-C: one line and exit code 130, wherever it comes. Real signals, in own processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap

import pytest

from comrope.experiments.common import interrupts

START = """
import atexit, os, sys, time
from comrope.experiments.common import interrupts

def now():
    print("now", flush=True)
    time.sleep(60)

interrupts.handle()
"""
STOPPED = (130, "comrope: stopped\n")
# What a process does. It gets a signal whenever it prints a line.
CASES = {
    "anywhere": ("now()", STOPPED),
    "in an import": ("sys.path.insert(0, FOLDER)\nimport slow", STOPPED),
    "in a finalizer, where no exception can be raised": (
        "class A:\n    def __del__(self):\n        now()\nA()\ntime.sleep(60)",
        STOPPED,
    ),
    "while the first is handled": ("try:\n    now()\nfinally:\n    now()", STOPPED),
    "after the first was lost": (
        "try:\n    now()\nexcept BaseException:\n    pass\nnow()",
        STOPPED,
    ),
    "at the end": ('atexit.register(now)\ninterrupts.leave(7, "last")', (7, "last\n")),
    "after the end of a command without a line": (
        "atexit.register(now)\ninterrupts.leave(0)",
        (0, ""),
    ),
    "after a traceback": ("atexit.register(now)\n1 / 0", (130, "ZeroDivisionError")),
}
SLOW = """
try:
    sys.modules["__main__"].now()
except BaseException:
    raise ImportError("could not be imported")
"""


def interrupted(code: str, **options) -> tuple[int, str]:
    """The exit code and standard error of a process."""
    with subprocess.Popen(
        [sys.executable, "-c", START + code], stdout=subprocess.PIPE, text=True,
        **{"stderr": subprocess.PIPE, **options},
    ) as process:  # fmt: skip
        for _ in process.stdout:
            process.send_signal(signal.SIGINT)
        printed = process.stderr.read() if process.stderr else ""
    return process.returncode, printed


@pytest.mark.parametrize("how", CASES)
def test_it_is_one_line_at_any_moment(how, tmp_path):
    (tmp_path / "slow.py").write_text("import sys\n" + SLOW)
    code, (expected, line) = CASES[how]
    found, printed = interrupted(code.replace("FOLDER", repr(str(tmp_path))))
    if how == "after a traceback":
        assert line in printed
        assert printed.endswith("comrope: stopped\n")
        assert "KeyboardInterrupt" not in printed
    else:
        assert printed == line
    assert found == expected


def test_a_background_job_goes_on():
    code = "print(1, flush=True)\ntime.sleep(0.3)\nsys.exit(3)"
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    assert interrupted(code, preexec_fn=ignore) == (3, "")


def test_a_terminal_gets_its_cursor_back():
    ours, theirs = pty.openpty()
    code = 'os.write(2, b"\\x1b[?25l 3/9 steps")\nnow()'
    assert interrupted(code, stderr=theirs)[0] == 130
    printed = os.read(ours, 1000)
    os.close(ours), os.close(theirs)
    assert printed.endswith(b"\r\x1b[K\x1b[?25hcomrope: stopped\r\n")


def test_outside_of_commands_it_is_an_exception_every_time():
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            interrupts.interrupt(signal.SIGINT, None)
    assert not interrupts.received()
    with pytest.raises(SystemExit):
        interrupts.leave(3)
    with pytest.raises(KeyboardInterrupt):
        interrupts.interrupt(signal.SIGINT, None)


def test_it_takes_effect_before_imports_that_take_time():
    code = textwrap.dedent("""
        import sys
        from comrope.experiments.common import interrupts, streams
        assert not {"torch", "typer", "rich", "yaml", "numpy"} & set(sys.modules)
    """)
    subprocess.run([sys.executable, "-c", code], check=True)
