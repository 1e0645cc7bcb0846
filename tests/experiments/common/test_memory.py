"""Memory: plausible sizes; too much is refused, and an allocator's error is one line."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch
from helpers import raises_for
from support.faults import raises_line

from comrope.experiments.common import memory
from comrope.experiments.common.errors import UserError


def test_sizes_are_plausible():
    total = memory.total_memory()
    assert 2**20 < memory.available_memory() <= total <= psutil.virtual_memory().total


def test_more_than_the_machine_has_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "total_memory", lambda device: 100)
    memory.require_memory(100, "a.field", "it")
    with raises_for("a.field", UserError):
        memory.require_memory(101, "a.field", "it")


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: np.empty(2**60, np.uint8),
        lambda: fail(MemoryError()),
        lambda: fail(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")),
    ],
)
def test_an_error_of_an_allocator_says_what_to_do(allocate):
    with raises_line("not enough memory", "; take less"), memory.shortage_reported("take less"):
        allocate()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("x"), UserError("x")])
def test_other_errors_stay(error):
    with pytest.raises(type(error), match=str(error)), memory.shortage_reported("take less"):
        raise error
