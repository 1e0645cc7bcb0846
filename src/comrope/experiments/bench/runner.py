"""How a comparison is run: gated, timed in turns, set against its baselines.

Eager candidates are timed together, one after the other in every round. Compiled ones come one at a
time, each built, checked and dropped again, in turns with a yardstick (no position encoding, or the
copying of memory). A ratio between two candidates is that of their times, each in units of the
yardstick of its own rounds. Times are those of the device (``timing``): how fast a CPU launches is
no property of a position encoding, and is noted beside them. On a GPU that means CUDA graphs, but
for the plain formulas, which make the CPU wait.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from comrope.experiments.bench.cases import Setting
from comrope.experiments.bench.parity import Verdict
from comrope.experiments.common.timing import (
    Recorder,
    Times,
    Work,
    allocated,
    make_ready,
    peak_above,
    time_in_turns,
)

__all__ = ["FAILURES", "Baseline", "Candidate", "Part", "Subject", "run_part"]

MOST_COMPILATIONS = 1000
NOT_CAPTURED = ("reference", "spectral")  # backends whose exponentials or eigenvalues synchronise
FAILURES = ("parity failed", "failed")  # what makes the exit code of a run other than zero
Row = dict[str, Any]
Advance = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """Something built and ready: what to time, how to check it, what it cannot help moving."""

    calls: dict[str, Callable[[], Any]]  # "forward", and then "step": forward and backward
    check: Callable[[], Verdict]
    moved: dict[str, int] = field(default_factory=dict)  # bytes, of rotations
    ran: str = ""  # the backend that is used, whatever was asked for
    work: dict[str, Work] = field(default_factory=dict)  # the calls, once they may be timed


@dataclass(frozen=True)
class Candidate:
    """A row to be: built only when its turn has come."""

    name: str
    build: Callable[[], Subject]
    method: str = ""  # the key of its colour; empty for what is no position encoding at all
    backend: str = ""
    positions: str = "shared"
    compiled: bool = False


@dataclass(frozen=True)
class Baseline:
    """What rows are divided by: eager rows by the eager one, unless ``by_best``: the compiled."""

    label: str
    name: str
    by_best: bool = False
    only: str = ""  # for the rows whose names begin like this


@dataclass(frozen=True)
class Part:
    """One comparison: a table and a row of the picture."""

    suite: str
    title: str
    yardstick: str  # the name of a candidate
    candidates: Sequence[Candidate]
    baselines: Sequence[Baseline]


def run_part(
    part: Part,
    setting: Setting,
    advance: Advance = lambda note: None,
    into: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Rows as they go into results.json, in the order of the candidates.

    They are put into ``into`` at once, so that what was timed is there if this is interrupted.
    """
    rows = {id(candidate): _row(part, candidate) for candidate in part.candidates}
    finished = list(rows.values())
    if into is not None:
        into += finished
    runner = _Runner(part, setting, rows, advance)
    try:
        runner.time_eager()
        torch.compiler.reset()
        with _many_compilations():
            runner.time_compiled()
        torch.compiler.reset()
    finally:
        _compare(finished, part.baselines)
    return finished


@contextlib.contextmanager
def _many_compilations() -> Iterator[None]:
    """The code of one module is compiled for many instances here, each with its own options."""
    with torch._dynamo.config.patch(
        recompile_limit=MOST_COMPILATIONS,
        accumulated_recompile_limit=MOST_COMPILATIONS,
        fail_on_recompile_limit_hit=True,  # rather than time what is not compiled
    ):
        yield


class _Runner:
    def __init__(
        self, part: Part, setting: Setting, rows: dict[int, Row], advance: Advance
    ) -> None:
        self.part, self.setting, self.rows, self.advance = part, setting, rows, advance
        self.eager_yardstick: Subject | None = None
        self.recorder = Recorder() if setting.device.type == "cuda" else None

    def time_eager(self) -> None:
        ready: dict[int, Subject] = {}
        for candidate in self.part.candidates:
            if candidate.compiled:
                continue
            self.advance(candidate.name)
            if subject := self._gated(candidate):
                ready[id(candidate)] = subject
                if candidate.name == self.part.yardstick:
                    self.eager_yardstick = subject
        found = self._measure(ready, on_round=lambda: self.advance("in turns"))
        yard = next((t for s, t in found.items() if ready[s] is self.eager_yardstick), None)
        for key, times in found.items():
            self._note(self.rows[key], ready[key], times, yard)

    def time_compiled(self) -> None:
        compiled = [c for c in self.part.candidates if c.compiled]
        own = next((c for c in compiled if c.name == self.part.yardstick), None)
        yardstick = self.eager_yardstick
        if own is not None:
            self.advance(own.name)
            yardstick = self._gated(own)
        seen: list[dict[str, Times]] = []
        try:
            for candidate in compiled:
                if candidate is not own:
                    self._time_beside(yardstick, candidate, seen)
            if own is not None and yardstick is not None and not seen:
                seen += [self._measure({0: yardstick})[0]]
        finally:  # others are compared with it, even if not all had their turn
            if own is not None and yardstick is not None and seen:
                times = {key: _together([some[key] for some in seen]) for key in seen[0]}
                self._note(self.rows[id(own)], yardstick, times, times)

    def _time_beside(
        self, yardstick: Subject | None, candidate: Candidate, seen: list[dict[str, Times]]
    ) -> None:
        """One compiled candidate in turns with the yardstick, whose times are added to ``seen``."""
        self.advance(candidate.name)
        if (subject := self._gated(candidate)) is None:
            return
        pair = {0: subject} if yardstick is None else {0: subject, 1: yardstick}
        try:
            found = self._measure(pair)
        except Exception as error:  # whatever one candidate does, the others go on
            self.rows[id(candidate)].update(_why(candidate, error))
            return
        seen += [found[1]] if 1 in found else []
        self._note(self.rows[id(candidate)], subject, found[0], found.get(1))

    def _measure(
        self, subjects: dict[int, Subject], on_round: Callable[[], None] = lambda: None
    ) -> dict[int, dict[str, Times]]:
        """All calls of all subjects, in turns."""
        work = {
            (number, key): ready
            for number, subject in subjects.items()
            for key, ready in subject.work.items()
        }
        times = time_in_turns(work, self.setting.device, on_round=on_round)
        return {
            number: {key: times[number, key] for key in subject.calls}
            for number, subject in subjects.items()
        }

    def _gated(self, candidate: Candidate) -> Subject | None:
        """The candidate, built and found correct; otherwise its row says why it is not timed."""
        row, device = self.rows[id(candidate)], self.setting.device
        before, begun = allocated(device), time.monotonic()
        try:
            subject = candidate.build()
            verdict = subject.check()
            row["ran"] = subject.ran
            row.update(error=verdict.error, limit=verdict.limit, checked=verdict.part)
            if not verdict.passed:
                row["status"] = "parity failed"
                return None
            peak = peak_above(device, before, list(subject.calls.values())[-1])
            how: dict[str, Any] = {"rounds": self.setting.rounds, "queued": True}
            # A graph copies memory by other means than a stream does, and more slowly.
            if candidate.method and candidate.backend not in NOT_CAPTURED:
                how["recorder"] = self.recorder
            work = {key: make_ready(call, device, **how) for key, call in subject.calls.items()}
        except Exception as error:  # whatever one candidate does, the others go on
            row.update(_why(candidate, error))
            return None
        finally:
            row["prepared_s"] = round(time.monotonic() - begun, 1)
        row["peak_mib"] = None if peak is None else peak / 2**20
        return replace(subject, work=work)

    def _note(
        self,
        row: Row,
        subject: Subject,
        times: dict[str, Times],
        yardstick: dict[str, Times] | None,
    ) -> None:
        row["status"] = "timed"
        measures: dict[str, Any] = {key: found._asdict() for key, found in times.items()}
        for key, measure in measures.items():
            if yardstick is not None:
                # Copying memory has no backward pass.
                own = key if key in yardstick else "forward"
                measure["yardstick_ms"] = yardstick[own].ms
            measure["of"] = {}
        if subject.moved and yardstick is not None:
            _share_of_copy(measures, subject.moved, 2 * self.setting.copied_mib * 2**20)
        row["measures"] = measures


def _row(part: Part, candidate: Candidate) -> Row:
    return {
        "suite": part.suite,
        "part": part.title,
        "name": candidate.name,
        "method": candidate.method,
        "backend": candidate.backend,
        "ran": "",
        "positions": candidate.positions,
        "compiled": candidate.compiled,
        "status": "not timed",
        "measures": {},
        "peak_mib": None,
        "peak_of": {},
    }


def _why(candidate: Candidate, error: Exception) -> Row:
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("comrope"):
        return {"status": "not installed", "reason": str(error.name)}
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    cannot = isinstance(error, (ValueError, NotImplementedError))
    if cannot and candidate.backend not in ("", "auto"):
        return {"status": "cannot run here", "reason": said.removeprefix("backend: ")}
    return {"status": "failed", "reason": f"{type(error).__name__}: {said}"}


def _together(times: Sequence[Times]) -> Times:
    """A yardstick that was measured several times, as one."""
    middle = statistics.median(t.ms for t in times)
    host = statistics.median(t.host_ms for t in times)
    low, high = min(t.low for t in times), max(t.high for t in times)
    return Times(middle, low, high, host, sum(t.rounds for t in times), times[0].graph)


def _share_of_copy(measures: dict[str, Any], moved: dict[str, int], copied: int) -> None:
    """How much of the speed of copying memory is reached, in bytes that must move."""
    for key, measure in measures.items():
        measure["of_copy"] = moved[key] / measure["ms"] / (copied / measure["yardstick_ms"])
    if "step" not in measures:
        return
    ms = measures["step"]["ms"] - measures["forward"]["ms"]
    if ms > 0:
        speed = (moved["step"] - moved["forward"]) / ms
        share = speed / (copied / measures["step"]["yardstick_ms"])
        measures["backward"] = {"ms": ms, "of_copy": share, "of": {}}


def _compare(rows: Sequence[Row], baselines: Sequence[Baseline]) -> None:
    """Give every row its ratios to the baselines, and per-sample positions theirs to shared."""
    for row in rows:
        for baseline in baselines:
            if row["method"] and row["name"].startswith(baseline.only):
                alike = [r for r in rows if r["name"] == baseline.name and r["measures"]]
                mode = True if baseline.by_best else row["compiled"]
                same = [r for r in alike if r["compiled"] == mode]
                _divide(row, baseline.label, same or (alike if baseline.by_best else []))
        if row["positions"] == "per sample":
            keys = ("method", "backend", "compiled")
            alike = [r for r in rows if r["positions"] == "shared" and r["measures"]]
            same = [r for r in alike if all(r[key] == row[key] for key in keys)]
            _divide(row, "shared", same)


def _divide(row: Row, label: str, baselines: Sequence[Row]) -> None:
    if not baselines or not row["measures"]:
        return
    base = baselines[0]
    for key in ("forward", "step"):
        ours, theirs = (r["measures"].get(key, {}) for r in (row, base))
        if "yardstick_ms" in ours and "yardstick_ms" in theirs:
            units = [m["ms"] / m["yardstick_ms"] for m in (ours, theirs)]
            ours["of"][label] = units[0] / units[1]
    if row["peak_mib"] and base["peak_mib"]:
        row["peak_of"][label] = row["peak_mib"] / base["peak_mib"]
