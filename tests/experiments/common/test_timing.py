"""Timers: candidates take turns, medians and quartiles, training and inference steps."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from comrope.experiments.common import timing
from comrope.experiments.common.timing import Times, inference_step, seconds, training_step

CPU = torch.device("cpu")


def no_cast() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Short samples."""
    monkeypatch.setattr(timing, "AIM", 1e-3)


def test_candidates_take_turns():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    work = {name: timing.make_ready(call, CPU, rounds=3) for name, call in calls.items()}
    order.clear()
    found = timing.time_in_turns(work, CPU)
    assert "".join(order) == "".join(work[name].repeats * name for name in "abc") * 3
    assert all(times.rounds == 3 for times in found.values())


def test_slow_calls_have_fewer_rounds(monkeypatch):
    monkeypatch.setattr(timing, "LONGEST", 0.05)
    calls = {"slow": lambda: time.sleep(0.02), "quick": lambda: None}
    work = {name: timing.make_ready(call, CPU, rounds=9) for name, call in calls.items()}
    found = timing.time_in_turns(work, CPU)
    assert (found["slow"].rounds, found["quick"].rounds) == (timing.FEWEST, 9)


def test_the_median_and_the_quartiles():
    times = Times.of([(took, took) for took in (0.001, 0.002, 0.003, 0.004, 0.1)])
    assert (times.ms, times.low, times.high) == pytest.approx((3, 2, 4))
    assert Times.of([(0.001, 0.002)]) == pytest.approx((1, 1, 1, 2, 1, 0))


def test_the_time_of_one_call():
    assert seconds(CPU, lambda: time.sleep(0.02)) >= 0.02


def test_memory_is_of_gpus_only():
    assert timing.allocated(CPU) is None
    assert timing.peak_above(CPU, None, pytest.fail) is None


def test_a_training_step_leaves_gradients_of_weights_only():
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), torch.randn(4, 2).requires_grad_()
    model[0].weight.grad = torch.full_like(model[0].weight, 100.0)
    model.eval()
    training_step(no_cast, model, [x], lambda output: output.sum().backward())
    assert model.training
    assert model[0].weight.grad.abs().max() < 100
    assert x.grad is None


def test_an_inference_step_records_nothing():
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    x = torch.randn(4, 2)
    found = inference_step(no_cast, model, [x])
    assert not model.training
    assert found.is_inference()
    torch.testing.assert_close(found, model[0](x))
