"""Timers. Candidates are timed in turns, so that a change of the machine's speed affects all."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "Cast",
    "Recorder",
    "Times",
    "Work",
    "allocated",
    "cross_entropy_backward",
    "inference_step",
    "make_ready",
    "peak_above",
    "peak_of_tensors",
    "sample",
    "seconds",
    "time_in_turns",
    "training_step",
]

Cast = Callable[[], torch.autocast]
Call = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)
# Short calls are repeated until a sample takes about AIM seconds, at most MOST times: the queue of
# a GPU holds about a thousand launches.
AIM, MOST = 0.005, 10
# Slow calls have fewer rounds: as many as fit into LONGEST seconds, at least FEWEST.
LONGEST, FEWEST = 1.5, 6
CYCLES = 2e9  # of a GPU's clock per second, about


class Times(NamedTuple):
    """Milliseconds per call: median and quartiles over the rounds."""

    ms: float
    low: float
    high: float
    host_ms: float  # launch time of the CPU, including waits for a full queue
    rounds: int
    graph: bool = False  # whether it was replayed as a CUDA graph

    @classmethod
    def of(cls, samples: Sequence[tuple[float, float]], graph: bool = False) -> Times:
        took = [1e3 * device for device, _ in samples]
        low, middle, high = (
            statistics.quantiles(took, n=4, method="inclusive") if len(took) > 1 else 3 * took
        )
        host = statistics.median(1e3 * host for _, host in samples)
        return cls(middle, low, high, host, len(took), graph)


@dataclass(frozen=True)
class Work:
    """A call that is prepared for timing."""

    run: Call  # calls it ``repeats`` times
    repeats: int
    rounds: int  # at most
    ahead: float = 0.0  # seconds that the queue is blocked before (see ``sample``)
    host: float | None = None  # seconds of the CPU per call, if ``run`` does not measure them


class Recorder:
    """Record CUDA graphs that share memory and one stream. Replay one at a time.

    A replay overwrites the results of other graphs.
    """

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(self, run: Call) -> Call:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            run()
        return graph.replay


def seconds(device: torch.device, call: Call) -> float:
    """Return the wall time of one call, from idle device to idle device."""
    _synchronize(device)
    begun = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - begun


def sample(device: torch.device, run: Call, ahead: float = 0.0) -> tuple[float, float]:
    """Return the seconds on the device, and the seconds of the CPU for launching.

    On a GPU, the time is measured by two events in the queue. ``ahead`` blocks the queue for that
    many seconds while the CPU fills it, so that the device does not wait for launches. On a CPU
    both numbers are equal.
    """
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        took = time.perf_counter() - begun
        return took, took
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    if ahead:
        torch.cuda._sleep(int(ahead * CYCLES))
    start.record()
    begun = time.perf_counter()
    run()
    host = time.perf_counter() - begun
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3, host


def make_ready(
    call: Call,
    device: torch.device,
    *,
    rounds: int,
    warm_up: int = 2,
    queued: bool = False,
    recorder: Recorder | None = None,
) -> Work:
    """Warm up a call, measure it once, and choose repeats and rounds.

    ``queued`` fills the queue of a GPU before the measurement, so that launch times of the CPU do
    not count. ``recorder`` replays the calls as a CUDA graph, for any number of launches.
    """
    for _ in range(warm_up):
        call()
    took, host = sample(device, call)
    ahead = 1.5 * host + 1e-3 if queued or recorder else 0.0
    if ahead:
        took, host = sample(device, call, ahead)
    repeats = max(1, min(MOST, int(AIM / max(took, 1e-9))))
    if recorder is not None:
        fitting = int(LONGEST / (took * repeats))
        run = recorder.record(_repeated(call, repeats))
        return Work(run, repeats, min(rounds, max(FEWEST, fitting)), host=host)
    ahead *= repeats
    fitting = int(LONGEST / (ahead + max(took, host) * repeats))
    return Work(_repeated(call, repeats), repeats, min(rounds, max(FEWEST, fitting)), ahead)


def time_in_turns(
    work: Mapping[Name, Work],
    device: torch.device,
    *,
    on_round: Callable[[], Any] = lambda: None,
) -> dict[Name, Times]:
    """Time all work in turns, once per round; slow work has fewer rounds."""
    samples: dict[Name, list[tuple[float, float]]] = {name: [] for name in work}
    for number in range(max((some.rounds for some in work.values()), default=0)):
        for name, some in work.items():
            if number < some.rounds:
                took, host = sample(device, some.run, some.ahead)
                each = host / some.repeats if some.host is None else some.host
                samples[name].append((took / some.repeats, each))
        on_round()
    return {name: Times.of(some, work[name].host is not None) for name, some in samples.items()}


def _repeated(call: Call, repeats: int) -> Call:
    def run() -> None:
        for _ in range(repeats):
            call()

    return run


def allocated(device: torch.device) -> int | None:
    """Return the bytes that tensors hold on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def peak_above(device: torch.device, before: int | None, call: Call) -> int | None:
    """Return the peak bytes of a call above ``before``; None on a CPU."""
    if before is None:
        return None
    call()  # allocate memory that is kept between calls
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_of_tensors(call: Call) -> int:
    """Return the peak bytes of the tensors that a call allocates on a CPU, from its profile."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints a line for each use
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        call()
    assert profiled.profiler is not None
    found = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


def training_step(
    cast: Cast, model: nn.Module, inputs: Sequence[Tensor], backward: Callable[[Tensor], None]
) -> None:
    """Run forward and backward without the optimizer; ``backward`` gets the model's output."""
    model.train()
    model.zero_grad(set_to_none=True)
    for tensor in inputs:
        tensor.grad = None
    with cast():
        output = model(*inputs)
    backward(output)
    for tensor in inputs:  # other candidates use the same inputs, and their memory is measured
        tensor.grad = None


def cross_entropy_backward(targets: Tensor, logits: Tensor) -> None:
    nn.functional.cross_entropy(logits.float(), targets).backward()


@torch.inference_mode()
def inference_step(cast: Cast, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    model.eval()
    with cast():
        return model(*inputs)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
