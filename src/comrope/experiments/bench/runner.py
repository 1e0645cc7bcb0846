"""Run a comparison: check every candidate, time the candidates in turns, compute ratios.

Eager candidates are timed in turns, all in every round. Compiled ones are built, checked, timed and
deleted one at a time, in turns with a reference row (no position encoding, or a copy of memory). In
a part with ``together``, for a CPU, all rows are timed in turns, eager and compiled ones in the
same rounds. The ratio of two candidates is the ratio of their times, each divided by the time of
the reference row in the same rounds. All rounds may be repeated: then a ratio is the median of
those of the repetitions. Times are device times (``timing``); launch times of the CPU are recorded
too. On a GPU, CUDA graphs are replayed, except for backends that synchronize.
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
    peak_of_tensors,
    time_in_turns,
)

__all__ = ["FAILURES", "Baseline", "Benchmark", "Candidate", "Part", "run_part"]

MOST_COMPILATIONS = 1000
NOT_CAPTURED = ("reference", "spectral")  # backends whose exponentials or eigenvalues synchronize
FAILURES = ("parity failed", "failed")  # statuses that make the exit code 1
Row = dict[str, Any]
Advance = Callable[[str], None]
Runs = list[Times]  # one for each repetition


@dataclass(frozen=True)
class Benchmark:
    """A constructed candidate: calls to time, a correctness check, the bytes that must move."""

    calls: dict[str, Callable[[], Any]]  # "forward", and then "step": forward and backward
    check: Callable[[], Verdict]
    moved: dict[str, int] = field(default_factory=dict)  # bytes, of rotations
    ran: str = ""  # the backend that "auto" selected
    work: dict[str, Work] = field(default_factory=dict)  # the calls, prepared for timing


@dataclass(frozen=True)
class Candidate:
    """A row of a table, constructed when it is measured."""

    name: str
    build: Callable[[], Benchmark]
    method: str = ""  # determines the color; empty for a copy of memory
    backend: str = ""
    positions: str = "shared"
    compiled: bool = False
    sizes: dict[str, int] = field(default_factory=dict)  # of a row that differs in its sizes


@dataclass(frozen=True)
class Baseline:
    """The row that times are divided by: eager for eager rows, unless compiled is preferred."""

    label: str
    name: str
    prefer_compiled: bool = False
    only: str = ""  # prefix of the names of its rows


@dataclass(frozen=True)
class Part:
    """One comparison: a table, and a row of the figure."""

    suite: str
    title: str
    reference_row: str  # the name of a candidate
    candidates: Sequence[Candidate]
    baselines: Sequence[Baseline]
    together: bool = False  # time eager and compiled rows in the same rounds
    rounds: int | None = None  # at most, of parts whose calls are slow


def run_part(
    part: Part,
    setting: Setting,
    advance: Advance = lambda note: None,
    into: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Measure all candidates; return their rows of results.json.

    Rows are appended to ``into`` first, so that an interruption keeps the measured times.
    """
    rows = {id(candidate): _row(part, candidate) for candidate in part.candidates}
    finished = list(rows.values())
    if into is not None:
        into += finished
    runner = _Runner(part, setting, rows, advance)
    try:
        with _many_compilations():
            runner.time_in_turns()
            if not part.together:
                torch.compiler.reset()
                runner.time_compiled()
        torch.compiler.reset()
    finally:
        _compare(finished, part.baselines)
    return finished


@contextlib.contextmanager
def _many_compilations() -> Iterator[None]:
    """Raise the recompile limit: many instances of one module are compiled here."""
    with torch._dynamo.config.patch(
        recompile_limit=MOST_COMPILATIONS,
        accumulated_recompile_limit=MOST_COMPILATIONS,
        fail_on_recompile_limit_hit=True,  # never time code that fell back to eager mode
    ):
        yield


class _Runner:
    def __init__(
        self, part: Part, setting: Setting, rows: dict[int, Row], advance: Advance
    ) -> None:
        self.part, self.setting, self.rows, self.advance = part, setting, rows, advance
        self.eager_reference: Benchmark | None = None
        self.recorder = Recorder() if setting.device.type == "cuda" else None

    def time_in_turns(self) -> None:
        """Time the eager candidates, or all candidates of a part with ``together``."""
        ready: dict[int, Benchmark] = {}
        for candidate in self.part.candidates:
            if candidate.compiled and not self.part.together:
                continue
            self.advance(candidate.name)
            if benchmark := self._gated(candidate):
                ready[id(candidate)] = benchmark
                if candidate.name == self.part.reference_row and not candidate.compiled:
                    self.eager_reference = benchmark
        found = self._measure(ready, on_round=lambda: self.advance("in turns"))
        reference = next((t for s, t in found.items() if ready[s] is self.eager_reference), None)
        for key, times in found.items():
            self._note(self.rows[key], ready[key], times, reference)

    def time_compiled(self) -> None:
        compiled = [c for c in self.part.candidates if c.compiled]
        own = next((c for c in compiled if c.name == self.part.reference_row), None)
        reference_row = self.eager_reference
        if own is not None:
            self.advance(own.name)
            reference_row = self._gated(own)
        seen: list[dict[str, Runs]] = []
        try:
            for candidate in compiled:
                if candidate is not own:
                    self._time_with_reference(reference_row, candidate, seen)
            if own is not None and reference_row is not None and not seen:
                seen += [self._measure({0: reference_row})[0]]
        finally:  # also after an interruption, because ratios need the reference row
            if own is not None and reference_row is not None and seen:
                times = {
                    key: [
                        _together(same) for same in zip(*(some[key] for some in seen), strict=True)
                    ]
                    for key in seen[0]
                }
                self._note(self.rows[id(own)], reference_row, times, times)

    def _time_with_reference(
        self, reference_row: Benchmark | None, candidate: Candidate, seen: list[dict[str, Runs]]
    ) -> None:
        """Time a compiled candidate in turns with the reference row, whose times go to ``seen``."""
        self.advance(candidate.name)
        if (benchmark := self._gated(candidate)) is None:
            return
        pair = {0: benchmark} if reference_row is None else {0: benchmark, 1: reference_row}
        try:
            found = self._measure(pair)
        except Exception as error:  # a failing candidate does not stop the others
            self.rows[id(candidate)].update(_why(candidate, error))
            return
        seen += [found[1]] if 1 in found else []
        self._note(self.rows[id(candidate)], benchmark, found[0], found.get(1))

    def _measure(
        self, benchmarks: dict[int, Benchmark], on_round: Callable[[], None] = lambda: None
    ) -> dict[int, dict[str, Runs]]:
        """Time all calls of all benchmarks in turns, in every repetition."""
        work = {
            (number, key): ready
            for number, benchmark in benchmarks.items()
            for key, ready in benchmark.work.items()
        }
        device = self.setting.device
        runs = [time_in_turns(work, device, on_round=on_round) for _ in range(self.setting.runs)]
        return {
            number: {key: [times[number, key] for times in runs] for key in benchmark.calls}
            for number, benchmark in benchmarks.items()
        }

    def _gated(self, candidate: Candidate) -> Benchmark | None:
        """Build and check a candidate; return None, with the reason in its row, on failure."""
        row, device = self.rows[id(candidate)], self.setting.device
        before, begun = allocated(device), time.monotonic()
        try:
            benchmark = candidate.build()
            verdict = benchmark.check()
            row["ran"] = benchmark.ran
            row.update(error=verdict.error, limit=verdict.limit, checked=verdict.part)
            if not verdict.passed:
                row["status"] = "parity failed"
                return None
            last = list(benchmark.calls.values())[-1]
            peak = peak_above(device, before, last)
            how: dict[str, Any] = {"rounds": self.part.rounds or self.setting.rounds}
            if self.part.together:
                how["warm_up"] = 0  # the check has made the same calls
                peak = peak_of_tensors(last) if peak is None else peak
            how["queued"] = True
            # A CUDA graph copies memory more slowly than a stream, so copies are not captured.
            if candidate.method and candidate.backend not in NOT_CAPTURED:
                how["recorder"] = self.recorder
            work = {key: make_ready(call, device, **how) for key, call in benchmark.calls.items()}
        except Exception as error:  # a failing candidate does not stop the others
            row.update(_why(candidate, error))
            return None
        finally:
            row["prepared_s"] = round(time.monotonic() - begun, 1)
        row["peak_mib"] = None if peak is None else peak / 2**20
        return replace(benchmark, work=work)

    def _note(
        self,
        row: Row,
        benchmark: Benchmark,
        times: dict[str, Runs],
        reference_row: dict[str, Runs] | None,
    ) -> None:
        row["status"] = "timed"
        measures: dict[str, Any] = {}
        for key, runs in times.items():
            measures[key] = measure = _together(runs)._asdict()
            measure["runs"] = [found.ms for found in runs]
            if reference_row is not None:
                # Copying memory has no backward pass.
                reference = reference_row[key if key in reference_row else "forward"]
                measure["reference_ms"] = _together(reference).ms
                measure["reference_runs"] = [found.ms for found in reference]
            measure |= {"of": {}, "of_runs": {}}
        if benchmark.moved and reference_row is not None and not self.part.together:
            _add_copy_fraction(measures, benchmark.moved, 2 * self.setting.copied_mib * 2**20)
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
        **({"sizes": candidate.sizes} if candidate.sizes else {}),
        "status": "not timed",
        "measures": {},
        "peak_mib": None,
        "peak_of": {},
    }


def _why(candidate: Candidate, error: Exception) -> Row:
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("comrope"):
        return {"status": "not installed", "reason": str(error.name)}
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    cannot = isinstance(error, (ValueError, NotImplementedError))
    if cannot and candidate.backend not in ("", "auto"):
        return {"status": "cannot run here", "reason": message.removeprefix("backend: ")}
    return {"status": "failed", "reason": f"{type(error).__name__}: {message}"}


def _together(times: Sequence[Times]) -> Times:
    """Merge several measurements of one row."""
    middle = statistics.median(t.ms for t in times)
    host = statistics.median(t.host_ms for t in times)
    low, high = min(t.low for t in times), max(t.high for t in times)
    return Times(middle, low, high, host, sum(t.rounds for t in times), times[0].graph)


def _add_copy_fraction(measures: dict[str, Any], moved: dict[str, int], copied: int) -> None:
    """Add the fraction of the copy bandwidth, counting the bytes that must move."""
    for key, measure in measures.items():
        measure["fraction_of_copy_bandwidth"] = (
            moved[key] / measure["ms"] / (copied / measure["reference_ms"])
        )
    if "step" not in measures:
        return
    ms = measures["step"]["ms"] - measures["forward"]["ms"]
    if ms > 0:
        speed = (moved["step"] - moved["forward"]) / ms
        share = speed / (copied / measures["step"]["reference_ms"])
        measures["backward"] = {"ms": ms, "fraction_of_copy_bandwidth": share, "of": {}}


def _compare(rows: Sequence[Row], baselines: Sequence[Baseline]) -> None:
    """Add ratios to the baselines, and of per-sample positions to shared ones."""
    for row in rows:
        for baseline in baselines:
            if row["method"] and row["name"].startswith(baseline.only):
                alike = [r for r in rows if r["name"] == baseline.name and r["measures"]]
                mode = True if baseline.prefer_compiled else row["compiled"]
                same = [r for r in alike if r["compiled"] == mode]
                _divide(row, baseline.label, same or (alike if baseline.prefer_compiled else []))
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
        if "reference_runs" in ours and "reference_runs" in theirs:
            units = [
                [
                    ms / reference
                    for ms, reference in zip(m["runs"], m["reference_runs"], strict=True)
                ]
                for m in (ours, theirs)
            ]
            ratios = [mine / base for mine, base in zip(*units, strict=True)]
            ours["of_runs"][label], ours["of"][label] = ratios, statistics.median(ratios)
    if row["peak_mib"] and base["peak_mib"]:
        row["peak_of"][label] = row["peak_mib"] / base["peak_mib"]
