"""Judge what a reader does with an input: it reads it, or refuses it in one line that names it."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["Answer", "Finding", "ask", "require", "unexpected", "watched"]

SECONDS = 10.0  # of CPU time for one input
HANGS = 20  # seconds of real time, after which an input is interrupted
MEMORY = 2**32  # bytes of address space that one input may add
GROWTH = 2**30  # bytes by which the peak of the memory may rise with one input
LONGEST = 1500  # characters of a message
# Events of the interpreter that no reader of files may cause.
FORBIDDEN = (
    "ctypes.dlopen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
    "pickle.find_class", "socket.bind", "socket.connect", "subprocess.Popen", "webbrowser.open",
)  # fmt: skip
CHANGES = ("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Finding(Exception):
    """A reader does something that it must not do.

    Args:
        kind: What it does, without details of the input; equal for inputs with the same cause.
        details: More about this input.
    """

    def __init__(self, kind: str, details: str = "") -> None:
        super().__init__(f"{kind}: {details}" if details else kind)
        self.kind = kind


class Answer(NamedTuple):
    """What a reader answers: a value, or the message of its refusal."""

    value: Any
    message: str | None

    @property
    def accepted(self) -> bool:
        return self.message is None


def ask(
    read: Callable[[], Any], *, names: Sequence[object], errors: tuple[type[Exception], ...]
) -> Answer:
    """Call a reader and judge its error, if it raises one.

    Args:
        read: The call.
        names: A message must contain one of these: the file, or the argument.
        errors: The types of errors that refuse an input.

    Raises:
        Finding: It raises another error, or a message that is not one line, or names no file.
    """
    try:
        return Answer(read(), None)
    except Finding:
        raise
    except errors as error:
        _check_message(error, [str(name) for name in names])
        return Answer(None, str(error))
    except Exception as error:
        raise unexpected(error) from error


def unexpected(error: Exception) -> Finding:
    """Return the finding that an error of another type than expected is."""
    trace = "".join(traceback.format_exception(error))[-3000:]
    return Finding(f"{type(error).__name__} in {_place(error)}", trace)


def require(condition: bool, kind: str, details: object = "") -> None:
    """Raise ``Finding`` unless a condition holds."""
    if not condition:
        raise Finding(kind, str(details)[:2000])


@contextlib.contextmanager
def watched(
    folder: Path, *, alarm: bool = True, tolerated: tuple[type[Warning], ...] = ()
) -> Iterator[io.StringIO]:
    """Watch what happens within the block; it yields the printed text.

    Args:
        folder: The only folder in which files may be written.
        alarm: Whether to interrupt the block after a time; libFuzzer has its own alarm.
        tolerated: The types of allowed warnings, besides deprecations.

    Raises:
        Finding: A process or a connection was started, a pickle was opened, a file elsewhere was
            changed, a warning was raised, or the block needed too much time or memory.
    """
    printed = io.StringIO()
    events: list[str] = []
    begun, peak = time.process_time(), _peak()
    _watch.append((str(folder), events))
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(record=True) as raised,
            _limits(alarm),
        ):
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # files that a library leaves open
            yield printed
    finally:
        _watch.pop()
    took, more = time.process_time() - begun, _peak() - peak
    require(not events, f"forbidden: {events[:1]}", events)
    allowed = (DeprecationWarning, *tolerated)
    odd = [one for one in raised if not issubclass(one.category, allowed)]
    require(not odd, f"warning: {odd and odd[0].category.__name__}", odd and odd[0].message)
    require(took < SECONDS, "too slow", f"{took:.0f} s")
    require(more < GROWTH, "too much memory", f"{more / 2**20:.0f} MiB")
    for line in printed.getvalue().splitlines():
        require(line.isprintable(), "prints control characters", repr(line))


def _check_message(error: Exception, names: list[str]) -> None:
    text, place = str(error), _place(error)
    require(bool(text.strip()), f"empty message of {place}")
    require("\n" not in text, f"several lines in the message of {place}", text)
    require(text.isprintable(), f"control characters in the message of {place}", repr(text))
    require(len(text) <= LONGEST, f"a long message of {place}", f"{len(text)}: {text}")
    require(
        any(name in text for name in names), f"the message of {place} names no file", f"{text!r}"
    )


def _place(error: BaseException) -> str:
    """Return the innermost function of this package that an error passed."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def _innermost(frames: list[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if "/comrope/" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].name}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _limits(alarm: bool) -> Iterator[None]:
    """Limit address space, and real time if ``alarm``, within the block."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # only Linux has the file
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    if not alarm or threading.current_thread() is not threading.main_thread():
        alarm = False
    previous = signal.signal(signal.SIGALRM, _hangs) if alarm else None
    signal.alarm(HANGS if alarm else 0) if alarm else None
    try:
        yield
    finally:
        if alarm:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _hangs(_: int, frame: FrameType | None) -> None:
    stack = traceback.extract_stack(frame)
    raise Finding(f"hangs in {_innermost(stack)}", "".join(traceback.format_list(stack))[-2000:])


_watch: list[tuple[str, list[str]]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watch:
        return
    folder, events = _watch[-1]
    if event in FORBIDDEN:
        events.append(f"{event} {arguments!r:.200}")
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        _outside(event, arguments[0], folder, events)
    elif event in CHANGES:
        for path in arguments[:2] if event in ("os.link", "os.rename") else arguments[:1]:
            _outside(event, path, folder, events)


def _outside(event: str, path: Any, folder: str, events: list[str]) -> None:
    name = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if name and not name.startswith((folder, "/dev/null")) and "__pycache__" not in name:
        events.append(f"{event} {name}")


sys.addaudithook(_audit)
