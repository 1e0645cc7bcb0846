"""The rotation over its sizes: one size differs at a time, and every row is checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.benches import TINY

from comrope.experiments.bench import sizes as module
from comrope.experiments.bench.runner import run_part
from comrope.experiments.bench.sizes import sizes

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quick_bench")]


def test_one_size_differs_at_a_time():
    found = [
        c.sizes for c in sizes(replace(TINY, grid=(2, 2))).candidates if c.name != "rope-mixed"
    ]
    assert all(sum(chosen[k] != v for k, v in module.BASE.items()) <= 1 for chosen in found)
    assert max(chosen["tokens"] for chosen in found) == 784  # a trial


def test_memory_and_bytes_grow_with_the_tensors(monkeypatch):
    base = {"tokens": 8, "heads": 2, "block_size": 8, "axes": 2, "batch": 1}
    monkeypatch.setattr(module, "BASE", base)
    monkeypatch.setattr(module, "MOST_TOKENS", 8)
    monkeypatch.setattr(module, "SWEEPS", {"tokens": (8, 512), "block_size": (2, 8)})
    rows = run_part(sizes(replace(TINY, grid=(3, 3))), TINY)
    assert [(row["name"], row["sizes"]["tokens"], row["sizes"]["block_size"]) for row in rows] == [
        ("comrope-ld", 8, 8), ("rope-mixed", 8, 8), ("copy of q and k", 8, 8),
        ("comrope-ld", 512, 8), ("rope-mixed", 512, 8), ("copy of q and k", 512, 8),
        ("comrope-ld", 8, 2),
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"timed"}
    small, large = rows[2]["peak_mib"], rows[5]["peak_mib"]
    assert 50 < large / small < 80  # of 64 times as many numbers
