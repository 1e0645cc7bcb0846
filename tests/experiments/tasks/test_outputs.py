"""Outputs that are not finite are counted while a model is evaluated, and refused after a view."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from helpers import raises_for
from torch import nn

from comrope.experiments.common.errors import UserError
from comrope.experiments.tasks.outputs import OutputCheck


class View(NamedTuple):
    resolution: int = 24


def test_tensors_and_lists_of_them_are_counted():
    check = OutputCheck(torch.device("cpu"))
    check.add(torch.ones(3))
    assert check.wrong == 0
    check.add([torch.tensor([torch.nan, 1, torch.inf]), (torch.tensor([-torch.inf]),)])
    assert check.wrong == 3
    assert check.wrong.device.type == "cpu"


def test_modules_are_watched_within_a_block():
    check, model = OutputCheck(torch.device("cpu")), nn.Linear(1, 2)
    with torch.no_grad():
        model.bias[1] = torch.nan
        with check.watching([model]):
            model(torch.ones(4, 1))
        model(torch.ones(4, 1))
    assert check.wrong == 4


@pytest.mark.parametrize("wrong", [0.0, 2.0])
def test_the_view_is_named(wrong):
    if not wrong:
        OutputCheck.require_none(wrong, View())
        return
    with raises_for("view with resolution 24", UserError, naming="2 outputs"):
        OutputCheck.require_none(wrong, View())
