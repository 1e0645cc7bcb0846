"""Ctrl-C at any moment of a command: one line on stderr, exit code 130, no traceback.

Imports little, because it must be in effect before the imports that take seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, NoReturn

__all__ = ["LINE", "STOPPED", "handle", "interrupt", "leave", "received"]

LINE = "comrope: stopped"
STOPPED = 130  # exit code of a process that SIGINT ended
CLEAR = "\r\x1b[K\x1b[?25h"  # on a terminal: remove a progress bar, show the cursor


class State:
    """What the next Ctrl-C does. A signal handler has no other arguments."""

    handled = False  # they are handled here, in the process of a command
    received = False  # a first one came: it is a KeyboardInterrupt on its way
    leaving = False  # the last line is being printed
    code: int | None = None  # the process is about to end with this exit code


def handle() -> None:
    """Handle Ctrl-C in this process, unless it is ignored, as in background jobs."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    State.handled = True
    signal.signal(signal.SIGINT, interrupt)
    # Called last: then Python removes handlers, and a signal would replace the exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # Where an exception cannot be raised, or nothing catches it, Python would print a traceback.
    sys.unraisablehook = _unraisable
    sys.excepthook = _uncaught


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; a second one, or one during an import, ends the process at once.

    For signal handlers, also for those that first do something else. Outside of commands it always
    raises.
    """
    if State.code is not None:
        os._exit(State.code)
    if State.leaving:
        return
    if State.handled and (State.received or _imports(frame)):
        _end()
    State.received = State.handled
    raise KeyboardInterrupt


def received() -> bool:
    """Return whether a Ctrl-C raised KeyboardInterrupt, which may have become another error."""
    return State.received


def leave(code: int, line: str = "") -> NoReturn:
    """End with an exit code, after a last line on stderr; a Ctrl-C then ends the process at once.

    Args:
        code: The exit code.
        line: The line; none if empty.
    """
    State.leaving = State.handled
    if line:
        print(line, file=sys.stderr, flush=True)
    State.code = code if State.handled else None
    sys.exit(code)


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported: C extensions replace exceptions by their own."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _end() -> NoReturn:
    """Print the line and end the process, without cleaning up."""
    with contextlib.suppress(OSError):
        clear = CLEAR if os.isatty(2) else ""
        os.write(2, f"{clear}{LINE}\n".encode())
    os._exit(STOPPED)


def _unraisable(found: Any) -> None:
    if isinstance(found.exc_value, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(found)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, trace)
