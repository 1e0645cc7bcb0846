"""Compare the spectral rotation of one attention layer with the paper's Algorithm 1.

    python benchmarks/rotation.py                      # ViT-B at 224: 197 tokens, 12 heads, b = 8
    python benchmarks/rotation.py --out results.json
    python benchmarks/rotation.py --table results.json # the same as a Markdown table

Values and gradients are compared with a float64 reference first, in the same process. If they
differ, no speed is printed. The two backends are timed in turns; report their ratio.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import comrope
from comrope.analysis import scores

METHODS = ("comrope-ap", "comrope-ld", "comrope-torus", "rope-mixed")
BACKENDS = ("reference", "spectral")
TOLERANCE = 1e-4  # of a float32 gradient against its float64 reference


class Layer:
    """One embedding with the inputs of one attention layer."""

    def __init__(self, method: str, per_sample: bool, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.rope = comrope.RotaryEmbedding(
            method, num_heads=args.heads, head_dim=args.head_dim, block_size=args.block_size
        )
        shape = (args.batch, args.heads, args.tokens, args.head_dim)
        self.q, self.k, self.grad_q, self.grad_k = torch.randn(4, *shape).unbind(0)
        rows = (args.batch, args.tokens) if per_sample else (args.tokens,)
        self.positions = torch.rand(*rows, 2)

    def step(self, backend: str) -> None:
        """Run forward and backward of the rotation, with gradients of q, k and the angles."""
        self.rope.backend = backend
        q, k = self.q.detach().requires_grad_(), self.k.detach().requires_grad_()
        torch.autograd.backward(self.rope(q, k, self.positions), (self.grad_q, self.grad_k))

    def gradients(self, backend: str, dtype: torch.dtype) -> list[Tensor]:
        """Return the scores of two samples and their gradients, computed in ``dtype``."""
        self.rope.to(dtype).backend = backend
        q, k = (x[:2].detach().to(dtype).requires_grad_() for x in (self.q, self.k))
        positions = self.positions if self.positions.ndim == 2 else self.positions[:2]
        value = scores(self.rope, q, k, positions.to(dtype))
        loss = (value / value.detach().std()).tanh().sum()
        parts = [value, *torch.autograd.grad(loss, [q, k, *self.rope.parameters()])]
        self.rope.float()
        return [part.detach().double() for part in parts]

    def parity(self, backend: str) -> float:
        """Return the largest relative error against the float64 reference."""
        expected = self.gradients("reference", torch.float64)
        got = self.gradients(backend, torch.float32)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]
        return max(errors)


def median_times(layer: Layer, rounds: int) -> dict[str, float]:
    """Return the median seconds of a step of each backend, timed in turns."""
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for backend in BACKENDS:
        layer.step(backend)
    for _ in range(rounds):
        for backend in BACKENDS:
            start = time.perf_counter()
            layer.step(backend)
            times[backend].append(time.perf_counter() - start)
    return {backend: statistics.median(values) for backend, values in times.items()}


def peak_memory(method: str, per_sample: bool, backend: str, args: argparse.Namespace) -> float:
    """Return the peak MiB of one step in a new process (Linux; NaN elsewhere)."""
    if platform.system() != "Linux":
        return float("nan")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory_here, (method, per_sample, backend, args))


def _peak_memory_here(
    method: str, per_sample: bool, backend: str, args: argparse.Namespace
) -> float:
    small = argparse.Namespace(**{**vars(args), "batch": 1, "tokens": 2})
    Layer(method, per_sample, small).step(backend)  # allocate libraries and thread pools
    layer = Layer(method, per_sample, args)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    layer.step(backend)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def machine() -> dict[str, Any]:
    """Return hardware, versions, date and commit, which every reported number needs."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "comrope": comrope.__version__,
    }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(f"{'method':14} {'positions':11} {'error':>8} {'reference':>11} {'spectral':>11} "
          f"{'ratio':>7} {'peak ref.':>10} {'peak spec.':>10}")  # fmt: skip
    for method in METHODS:
        for per_sample in (False, True):
            layer = Layer(method, per_sample, args)
            error = layer.parity("spectral")
            kind = "per sample" if per_sample else "shared"
            row = {"method": method, "positions": kind, "error": error}
            rows.append(row)
            if not error <= TOLERANCE:
                print(f"{method:14} {kind:11} {error:8.1e}  parity failed: no speed is reported")
                continue
            times = median_times(layer, args.rounds)
            memory = {b: peak_memory(method, per_sample, b, args) for b in BACKENDS}
            ratio = times["reference"] / times["spectral"]
            row |= {
                "milliseconds": {b: round(1e3 * t, 3) for b, t in times.items()},
                "ratio": round(ratio, 2),
                "peak_mib": {b: round(m, 1) for b, m in memory.items()},
            }
            print(f"{method:14} {kind:11} {error:8.1e} {1e3 * times['reference']:8.1f} ms "
                  f"{1e3 * times['spectral']:8.1f} ms {ratio:6.1f}x {memory['reference']:6.0f} MiB "
                  f"{memory['spectral']:6.0f} MiB")  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("batch", 8), ("tokens", 197), ("heads", 12), ("head-dim", 64),
                          ("block-size", 8), ("rounds", 7)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--at-least", type=float, default=5.0, help="fail below this ratio")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--table", type=Path, help="print the table of this file and stop")
    args = parser.parse_args()
    if args.table:
        from comrope.experiments.studies.bench_tables import algorithm_1

        print(algorithm_1(json.loads(args.table.read_text())))
        return
    setting = {
        key: value for key, value in vars(args).items() if key not in ("out", "table", "at_least")
    }
    about = machine()
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, {about['date']}, "
          f"commit {about['commit']}\n{setting}\n")  # fmt: skip
    rows = run(args)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": about, "setting": setting, "rows": rows}
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nwritten to {args.out}")
    if any("ratio" not in row for row in rows):
        raise SystemExit("some parity checks failed")
    if min(row["ratio"] for row in rows) < args.at_least:
        raise SystemExit(f"some ratios are below {args.at_least}")


if __name__ == "__main__":
    main()
