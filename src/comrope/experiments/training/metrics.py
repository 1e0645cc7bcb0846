"""Loss, speed and share of time spent waiting for data, since the last report and of a run."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comrope._json import NUMBER
from comrope.experiments.common.errors import UserError

__all__ = ["Meter", "Report", "summarize_evaluations", "summarize_speed"]


class Report(NamedTuple):
    """Measurements since the last report."""

    loss: Tensor  # mean over the steps, of this process
    steps_per_second: float
    waiting: float  # share of the time spent waiting for data


class Meter:
    """Measures steps between reports."""

    def __init__(self) -> None:
        self._restart()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for data."""
        begun = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begun

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from the measured time."""
        begun = time.perf_counter()
        yield
        self.started += time.perf_counter() - begun

    def add(self, loss: Tensor) -> None:
        """Count a step with its loss, on the device."""
        self.losses.append(loss)

    def require_finite(self, step: int) -> None:
        """Raise if a loss since the last report is not finite."""
        if self.losses and not torch.stack(self.losses).isfinite().all():
            raise UserError(
                f"the loss is not finite before step {step}; existing checkpoints are earlier. Try "
                "a smaller optim.lr or optim.clip_grad"
            )

    def report(self) -> Report:
        """Return the measurements since the last report, and restart."""
        seconds = time.perf_counter() - self.started
        found = Report(
            torch.stack(self.losses).mean(), len(self.losses) / seconds, self.waited / seconds
        )
        self._restart()
        return found

    def _restart(self) -> None:
        self.losses: list[Tensor] = []
        self.waited, self.started = 0.0, time.perf_counter()


def summarize_evaluations(by_view: Mapping[str, Any], samples: str) -> dict[str, Any]:
    """Return the number of evaluated samples and the duration.

    Args:
        by_view: The evaluations by the name of their view.
        samples: Key of the number of samples.
    """
    return {
        samples: max(found[samples] for found in by_view.values()),
        "evaluation_seconds": sum(found["seconds"] for found in by_view.values()),
        "view_seconds": {name: found["seconds"] for name, found in by_view.items()},
    }


def summarize_speed(records: Sequence[Mapping[str, Any]], speed: str) -> dict[str, Any]:
    """Return the median speed and the mean share of waiting, after the first quarter of a run.

    The first quarter contains compilation and cold caches. Records without these figures are left
    out; both are None if no record has them.

    Args:
        records: The "train" records of its log.
        speed: The key of the speed in them.
    """
    names = (speed, "waiting_for_data")
    complete = [r for r in records if all(NUMBER.accepts(r.get(name)) for name in names)]
    if not complete:
        return dict.fromkeys(names)
    later = complete[len(complete) // 4 :]
    return {
        speed: statistics.median(record[speed] for record in later),
        "waiting_for_data": statistics.mean(record["waiting_for_data"] for record in later),
    }
