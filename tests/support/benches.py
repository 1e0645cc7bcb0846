"""What the tests of ``comrope bench`` share: a quick setting, and candidates that do nothing."""

from __future__ import annotations

import sys

import pytest
import torch

from comrope.experiments.bench import suites
from comrope.experiments.bench.cases import Setting
from comrope.experiments.bench.parity import Verdict
from comrope.experiments.bench.runner import Baseline, Benchmark, Candidate, Part
from comrope.experiments.cli import main

CPU = torch.device("cpu")
TINY = Setting(
    device=CPU, dtype=torch.float32, rounds=2, compile=False, batch=2, size="small", depth=1,
    grid=(2, 2), llama_tokens=8, llama_heads=2, llama_key_heads=1, llama_head_dim=16, copied_mib=1,
    language=suites.PRESETS["small"].sizes["language"], gpt=suites.PRESETS["small"].sizes["gpt"],
)  # fmt: skip


def command(monkeypatch, *arguments: object) -> int:
    """The exit code of ``comrope bench``, in this process."""
    monkeypatch.setattr(sys, "argv", ["comrope", "bench", *map(str, arguments), "--quiet"])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def fake(name: str, *, call=lambda: None, error: float = 0.0, **options) -> Candidate:
    """A candidate that does nothing, or calls the given function."""
    benchmark = Benchmark({"forward": call, "step": call}, lambda: Verdict(error, 1e-6, "all"))
    options.setdefault("method", "rope")
    return Candidate(name, lambda: benchmark, **options)


def fake_part(*candidates: Candidate, suite: str = "rotation") -> Part:
    return Part(suite, f"Nothing ({suite})", "none", candidates, (Baseline("none", "none"),))
