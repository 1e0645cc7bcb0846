from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """What is allocated for a kernel holds NaN until it is written."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        tensor = new_empty(self, *args, **kwargs)
        compiling = torch.compiler.is_compiling() or type(tensor) is not torch.Tensor
        return tensor if compiling or not tensor.is_floating_point() else tensor.fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
