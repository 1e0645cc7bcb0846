"""Fuzz the readers of files: every target for some time, and a table at the end.

    python tools/fuzz/run.py                       # all targets, ten minutes each
    python tools/fuzz/run.py coco shards --seconds 60 --jobs 2
    python tools/fuzz/run.py coco --replay FILE    # judge one input, and print what is wrong

Failing inputs are kept in OUT/NAME/failures, each with a text that says what is wrong. The exit
code is 1 if there are any. Ctrl-C ends the run and prints the table. Inputs that reach new code are
kept in OUT/NAME/corpus, where the next run continues.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz import targets
from fuzz.judge import Finding
from fuzz.kept import failures_in, kept_inputs, read_input

HERE = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
MOST_STARTS = 10  # of one target: a crash in native code ends its process
COVERAGE = re.compile(r"#\d+\s+\w+\s+cov: (\d+)")
CRASHES = {"crash": "native crash", "oom": "out of memory", "timeout": "hangs", "leak": "leak"}


@dataclass
class Total:
    """What the processes of one target have done so far."""

    name: str
    seconds: int
    begun: float = 0.0
    ended: float = 0.0
    before: int = 0  # executions of earlier processes
    own: int = 0  # executions of this process
    first: int | None = None  # coverage of the inputs that existed before
    last: int = 0
    failures: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def executions(self) -> int:
        return self.before + self.own

    def row(self) -> tuple[str, ...]:
        new = f"+{self.last - (self.first or 0)}" if self.first is not None else "-"
        took = (self.ended or time.monotonic()) - self.begun if self.begun else 0
        return self.name, f"{took:.0f}", f"{self.executions:,}", new, str(len(self.failures))


def main() -> int:
    """Run the targets that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(targets.NAMES))
    parser.add_argument("--seconds", type=int, default=600, help="of each target (default: 600)")
    parser.add_argument("--jobs", type=int, default=1, help="targets at the same time (default: 1)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "fuzz")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="judge this input only")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in targets.NAMES]:
        parser.error(f"NAME: expected some of {', '.join(targets.NAMES)}, got {unknown[0]}")
    if asked.replay is not None:
        if len(asked.names) != 1:
            parser.error("--replay: expected one NAME")
        return _replay(asked.names[0], asked.replay)
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("atheris is not installed: pip install 'comrope[all,fuzz]'", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    totals = [Total(name, asked.seconds) for name in asked.names or targets.NAMES]
    stopped = _run(totals, asked.out, max(1, asked.jobs))
    _print(totals, asked.out)
    if any(total.failures or total.problem for total in totals):
        return 1
    return 130 if stopped else 0


def _replay(name: str, file: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            accepted = targets.create(name, Path(folder)).run(read_input(file))
        except Finding as found:
            print(found)
            return 1
    print("accepted" if accepted else "refused")
    return 0


def _run(totals: list[Total], out: Path, jobs: int) -> bool:
    """Run all targets; return whether Ctrl-C stopped them."""
    stop = threading.Event()
    interrupted = False
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_fuzz, total, out / total.name, stop) for total in totals]
        try:
            while not all(each.done() for each in running):
                time.sleep(1)
                _show(totals)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            stop.set()
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr)
    for each in running:
        each.result()
    return interrupted


def _fuzz(total: Total, out: Path, stop: threading.Event) -> None:
    """Fuzz one target until its time is over."""
    if stop.is_set():
        return
    total.begun = time.monotonic()
    try:
        _prepare(total.name, out)
    except ImportError as error:
        total.problem, total.ended = f"{error}: pip install 'comrope[all]'", time.monotonic()
        return
    end = time.monotonic() + total.seconds
    for _ in range(MOST_STARTS):
        left = end - time.monotonic()
        if left < 1 or stop.is_set():
            break
        code, lines = _child(total, out, int(left), stop)
        total.before, total.own = total.executions, 0
        native = _describe_native(out / "failures", lines)
        if code and not native and not stop.is_set():
            total.problem = "\n".join(lines[-15:])
        if not code or not native:
            break
    total.failures = sorted(failures_in(out / "failures"))
    total.ended = time.monotonic()


def _describe_native(failures: Path, lines: list[str]) -> list[Path]:
    """Add texts to new inputs that ended the process; return these inputs."""
    found = []
    for file in failures.glob("native-*"):
        text = file.with_name(f"{file.name}.txt")
        if file.suffix != ".txt" and not text.exists():
            kind = CRASHES.get(file.name.split("-")[1], "native crash")
            text.write_text(f"{kind}: {file.name}\n\n" + "\n".join(lines[-60:]) + "\n")
            found.append(file)
    return found


def _prepare(name: str, out: Path) -> None:
    """Make the corpus: valid inputs, those of the repository, and earlier failures."""
    corpus, failures = out / "corpus", out / "failures"
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        inputs = targets.create(name, Path(folder)).seeds()
    inputs += [read_input(path) for path in kept_inputs(name)]
    if failures.is_dir():
        inputs += [path.read_bytes() for path in failures.iterdir() if path.suffix != ".txt"]
        shutil.rmtree(failures)
    failures.mkdir()
    for data in inputs:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)


def _child(total: Total, out: Path, seconds: int, stop: threading.Event) -> tuple[int, list[str]]:
    """Run a process of one target; return its exit code and the last lines that it printed."""
    command = [sys.executable, str(CHILD), total.name, "--out", str(out), "--seconds", str(seconds)]
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for this process only
    )
    threading.Thread(target=_end_when, args=(process, stop), daemon=True).start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@ "):
            total.own = int(line[2:])
        elif line.startswith("! "):
            total.failures.append(line[2:].strip())
            _say(f"{total.name}: {line[2:].strip()}")
        elif found := COVERAGE.match(line):
            total.last = int(found[1])
            total.first = total.last if total.first is None and "INITED" in line else total.first
        lines = [*lines[-200:], line.rstrip()]
    return process.wait(), lines


def _end_when(process: subprocess.Popen[str], stop: threading.Event) -> None:
    while process.poll() is None:
        if stop.wait(0.5):
            process.terminate()
            return


_shown = 0.0


def _show(totals: list[Total]) -> None:
    """Print the progress: all the time on a terminal, else twice a minute."""
    global _shown
    running = [total for total in totals if total.begun and not total.ended]
    text = "; ".join(
        f"{took} s {name}: {runs} executions, coverage {new}, failures {failed}"
        for name, took, runs, new, failed in (total.row() for total in running)
    )
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:160]}", end="", file=sys.stderr, flush=True)
    elif time.monotonic() - _shown > 30:
        _shown = time.monotonic()
        _say(text)


def _say(text: str) -> None:
    start = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{start}{text}", file=sys.stderr, flush=True)


def _print(totals: list[Total], out: Path) -> None:
    rows = [("target", "seconds", "executions", "new coverage", "failures")]
    rows += [total.row() for total in totals]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print(row[0].ljust(widths[0]), *cells, sep="  ")
    for total in totals:
        for kind in total.failures:
            print(f"{total.name}: {kind}; see {out / total.name / 'failures'}")
        if total.problem:
            print(f"{total.name}: cannot be run\n{total.problem}")


if __name__ == "__main__":
    raise SystemExit(main())
