"""One name is replaced in another library's function, for some layers only."""

from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch
from helpers import raises_for
from torch import nn

from comrope.integrations.rebinding import (
    names_in,
    replace_forward,
    restore_forward,
    with_global_replaced,
)

FACTOR = 2.0


class Layer(nn.Module):
    def forward(self, x, *, shift=1.0):
        return FACTOR * x + shift


def tenfold(layer: type):
    return with_global_replaced(layer.forward, "FACTOR", 10.0)


def test_a_copy_of_a_function_has_another_global():
    found = with_global_replaced(Layer.forward, "FACTOR", 3.0)
    assert found(None, 1.0) == 4.0
    assert found(None, 1.0, shift=0.0) == 3.0
    assert Layer.forward(None, 1.0) == 3.0  # the original: 2 + 1
    assert "FACTOR" in names_in(Layer.forward)
    assert names_in(len) == ()
    for function in (Layer.__init__, len):
        with raises_for("function"):
            with_global_replaced(function, "FACTOR", 3.0)


def test_decorators_are_left_out():
    @functools.wraps(Layer.forward)
    def decorated(*_):
        raise AssertionError

    assert with_global_replaced(decorated, "FACTOR", 3.0)(None, 1.0) == 4.0
    assert "FACTOR" in names_in(decorated)


def test_one_layer_gets_another_forward_pass_and_its_own_back():
    ours, theirs, one = Layer(), Layer(), torch.ones(1)
    replace_forward(ours, tenfold)
    assert (ours(one).item(), theirs(one).item()) == (11, 3)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied(one).item() == 11
    restore_forward(ours)
    assert ours(one).item() == 3
    assert "forward" not in vars(ours)
    restore_forward(theirs)  # nothing to undo


def test_hooks_of_accelerate_stay_around_it():
    layer = Layer()
    layer._old_forward = layer.forward
    layer.forward = lambda x: -layer._old_forward(x)
    replace_forward(layer, tenfold)
    assert layer(torch.ones(1)).item() == -11
    restore_forward(layer)
    assert layer(torch.ones(1)).item() == -3


def test_a_copy_of_the_forward_pass_alone_is_refused_when_its_layer_is_gone():
    layer = Layer()
    replace_forward(layer, tenfold)
    forward = layer.forward
    del layer
    gc.collect()
    with pytest.raises(RuntimeError, match="deepcopy"):
        forward(torch.ones(1))
