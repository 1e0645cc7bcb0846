"""Which backend is selected, and why."""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING, make, queries_and_keys, raises_for

import comrope


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def tensors(rope):
    q, k = (x.detach().float() for x in queries_and_keys(rope))
    return q, k, torch.rand(6, 2)


@pytest.mark.parametrize("name", comrope.METHODS)
def test_on_a_cpu_commuting_methods_are_spectral(name):
    rope = make(name, dtype=torch.float32)
    backend, reason = rope.select_backend(*tensors(rope))
    assert backend == ("spectral" if name in COMMUTING else "reference")
    assert "cpu" in reason
    assert make("liere", num_axes=1).select_backend(*tensors(rope)[:2], torch.rand(6, 1))[0] == (
        "spectral"
    )


@pytest.mark.parametrize("name", comrope.METHODS)
def test_a_requested_backend_is_used_or_refused(name):
    rope = make(name, dtype=torch.float32, backend="reference")
    assert rope.select_backend(*tensors(rope)) == ("reference", "requested")
    rope.backend = "spectral"
    if name in COMMUTING:
        assert rope.select_backend(*tensors(rope)) == ("spectral", "requested")
        return
    with raises_for("backend"):
        rope.select_backend(*tensors(rope))


def test_the_reason_why_a_kernel_cannot_run():
    pytest.importorskip("triton")
    rope = make("comrope-ld", dtype=torch.float32)
    q, k, positions = tensors(rope)
    rope.backend = "triton"
    with pytest.raises(ValueError, match=r"backend: .*on cpu"):
        rope(q, k, positions)
    with pytest.raises(ValueError, match=r"backend: .*float32"):
        rope(q.double(), k.double(), positions)
    with pytest.raises(ValueError, match=r"backend: .*4 axes"):
        make("rope-mixed", num_axes=5, block_size=2, head_dim=20, backend="triton")
