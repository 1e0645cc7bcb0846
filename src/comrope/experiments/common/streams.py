"""Standard streams that are closed, whose reader has ended, or that lack characters.

Imports little, because ``comrope --help`` needs it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

__all__ = ["connect", "use_utf8"]

STDOUT, STDERR = 1, 2


def use_utf8() -> None:
    """Start Python again in its UTF-8 mode, if names of files have another encoding here.

    Without it, a name in a recipe would not be the name of a file, and a name of a file could not
    be written into a result.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        environment = {**os.environ, "PYTHONUTF8": "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def connect() -> None:
    """Connect this process to its standard streams, so that printing does not end a training.

    Closed ones become the null device: otherwise the next file that is opened would get their
    number, and what libraries in C print would be written into it. Characters that a stream does
    not have are printed as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)
    if sys.stdout is sys.__stdout__:  # otherwise a program has replaced it
        sys.stdout = _connected(sys.stdout, STDOUT)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _connected(sys.stderr, STDERR)


class Output(io.FileIO):
    """The bytes of a standard stream, which may be lost.

    What cannot be written to stderr is lost. So is what cannot be written to stdout because its
    reader has ended, such as ``head``; other errors of stdout, such as a full disk, are raised.

    Args:
        number: Of the open file.
        required: Whether errors are raised.
    """

    def __init__(self, number: int, *, required: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.required = required

    def write(self, data: Any) -> int:
        if not len(data):
            return 0  # a program asks whether it can write
        try:
            return super().write(data)
        except OSError as error:
            if self.required and not isinstance(error, BrokenPipeError):
                self.required = False  # once: Python writes the rest again when it ends
                raise OSError(f"standard output cannot be written ({error.strerror})") from None
            return len(data)


def _connected(stream: TextIO | None, number: int) -> TextIO:
    """Return a text stream of a standard stream, with the settings of the one from Python."""
    if stream is None:  # it was closed when Python started
        null = Output(os.open(os.devnull, os.O_WRONLY), required=False)
        return io.TextIOWrapper(io.BufferedWriter(null), "utf-8", "backslashreplace")
    assert isinstance(stream, io.TextIOWrapper)
    raw = Output(number, required=number == STDOUT)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
