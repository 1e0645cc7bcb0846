"""Averages of weights, and the state of optimizers as plain tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import raises_for
from timm.optim import create_optimizer_v2
from torch import nn

from comrope.experiments.training.state import (
    Average,
    load_optimizer,
    load_scaler,
    optimizer_numbers,
    optimizer_tensors,
)


def test_the_average_forgets_the_start_soon():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Average(model, decay=0.9)
    nn.init.ones_(model.weight)
    expected = 0.0
    for step in (0, 1, 1000):  # weights of the new value: 9/10, 9/11, and 1 - 0.9
        average.update(model, step)
        expected += (1 - min(0.9, (1 + step) / (10 + step))) * (1 - expected)
        assert average.tensors["weight"].item() == pytest.approx(expected)


def test_averages_take_the_place_of_the_parameters_for_a_while():
    model = nn.Linear(2, 2)
    average = Average(model, decay=0.5)
    old = copy.deepcopy(model.state_dict())
    nn.init.ones_(model.weight)
    with average.applied(model):
        assert torch.equal(model.weight, old["weight"])
    assert (model.weight == 1).all()
    assert torch.equal(average.tensors["weight"], old["weight"])
    average.load(model, {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    with average.applied(model):
        assert not model.weight.any()


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_a_restored_optimizer_goes_on_with_the_same_steps(name):
    def create(model):
        """The order of groups and of parameters in them is not that of the model."""
        groups = [{"params": [model[1].weight]}, {"params": [*model[0].parameters()]}]
        groups[0]["weight_decay"] = 0.1
        return create_optimizer_v2(groups, opt=name, lr=0.1, momentum=0.9)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    optimizer = create(model)
    step(model, optimizer)
    tensors = {n: t.clone() for n, t in optimizer_tensors(model, optimizer).items()}
    assert {key.rpartition("/")[0] for key in tensors} == {"0.weight", "0.bias", "1.weight"}
    numbers = copy.deepcopy(optimizer_numbers(optimizer))
    other = copy.deepcopy(model)
    fresh = create(other)
    load_optimizer(other, fresh, tensors, numbers)
    for _ in range(2):
        step(model, optimizer), step(other, fresh)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_state_of_another_optimizer_is_refused_and_nothing_is_changed():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for tensors, numbers in (({}, []), ({"other/exp_avg": torch.ones(1)}, [{"lr": 0.5}])):
        with raises_for("optimizer"):
            load_optimizer(model, optimizer, tensors, numbers)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_state_of_a_scaler_has_all_its_entries():
    fresh, unused = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    complete = {**fresh.state_dict(), "scale": 8.0}
    load_scaler(fresh, complete)
    assert fresh.get_scale() == 8.0
    for state in ({}, {name: v for name, v in complete.items() if name != "scale"}):
        with raises_for("scaler"):
            load_scaler(fresh, state)
    load_scaler(unused, {})
