"""Speed, waiting and loss of a training, by a clock that the test sets."""

from __future__ import annotations

import pytest
import torch

from comrope.experiments.common.errors import UserError
from comrope.experiments.training import metrics
from comrope.experiments.training.metrics import Meter, summarize_evaluations, summarize_speed


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_steps_are_measured_since_the_last_report(clock):
    meter = Meter()
    for loss in (1.0, 3.0):
        with meter.waiting():
            clock.now += 1
        clock.now += 3
        meter.add(torch.tensor(loss))
    with meter.paused():
        clock.now += 100  # a checkpoint
    assert meter.report() == (torch.tensor(2.0), 2 / 8, 2 / 8)
    clock.now += 4
    meter.add(torch.tensor(7.0))
    assert meter.report() == (torch.tensor(7.0), 1 / 4, 0)


@pytest.mark.parametrize("loss", [torch.nan, torch.inf])
def test_one_loss_that_is_not_finite_is_enough(loss):
    meter = Meter()
    meter.require_finite(0)  # nothing yet
    for value in (1.0, loss, 1.0):
        meter.add(torch.tensor(value))
    with pytest.raises(UserError):
        meter.require_finite(3)


def test_the_speed_of_a_run_is_that_after_its_first_quarter():
    records = [
        {"speed": speed, "waiting_for_data": waiting}
        for speed, waiting in ((1, 1.0), (50, 0.5), (9, 0.1), (10, 0.3))
    ]
    found = summarize_speed(records, "speed")
    assert found == {"speed": 10, "waiting_for_data": pytest.approx(0.3)}
    assert summarize_speed(records[:1], "speed")["speed"] == 1


def test_records_without_figures_are_left_out():
    record = {"speed": 5, "waiting_for_data": 0.5}
    others = [{}, {"speed": 1}, {**record, "speed": "fast"}, {**record, "speed": float("nan")}]
    assert summarize_speed([*others, record, *others], "speed") == record
    assert summarize_speed(others, "speed") == {"speed": None, "waiting_for_data": None}


def test_evaluations_have_as_many_samples_as_the_largest_and_their_seconds():
    by_view = {"12": {"images": 8, "seconds": 1.0}, "24": {"images": 9, "seconds": 2.5}}
    assert summarize_evaluations(by_view, "images") == {
        "images": 9,
        "evaluation_seconds": 3.5,
        "view_seconds": {"12": 1.0, "24": 2.5},
    }
