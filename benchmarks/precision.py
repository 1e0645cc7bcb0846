"""Measure the precision of every method against the distance of positions from the origin.

    python benchmarks/precision.py --out benchmarks/results/precision.json
    comrope report docs/theory.md      # writes the table

Scores in float32 are compared with float64. The float64 module has the same parameters, and the
positions are integers that float32 represents exactly, so only arithmetic differs.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import comrope
from comrope.analysis import scores
from comrope.experiments.common.console import machine
from comrope.methods import method_class

DISTANCES = tuple(10**power for power in range(8))
INITS = ("rope", "normal")
TOKENS, SEEDS = 14, 3


def errors(method: str, init: str, distance: int, dtype: torch.dtype, seed: int) -> list[float]:
    """Return the largest error of a score, and of the length of a rotated query.

    Args:
        method: One of ``comrope.METHODS``.
        init: Its initialization.
        distance: Coordinates of every axis are integers from here on.
        dtype: Of the positions. With float64, angles are computed in float64 too.
        seed: Of parameters, queries and keys.

    Returns:
        max |s - s64| / (|q| |k|) and max | |R q| / |q| - 1 |.
    """
    torch.manual_seed(seed)
    rope = comrope.RotaryEmbedding(method, num_heads=2, head_dim=64, block_size=8, init=init)
    q, k = torch.randn(2, 1, 2, TOKENS, 64).unbind(0)
    positions = distance + torch.stack((torch.arange(TOKENS), torch.randperm(TOKENS)), dim=-1)
    with torch.no_grad():
        exact = scores(copy.deepcopy(rope).double(), q.double(), k.double(), positions.double())
        found = scores(rope, q, k, positions.to(dtype))
        rotated = rope(q, k, positions.to(dtype))[0]
    lengths = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    return [
        _largest((found - exact) / lengths),
        _largest(rotated.norm(dim=-1) / q.norm(dim=-1) - 1),
    ]


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def measure() -> list[dict[str, Any]]:
    """Return the rows of the table: the largest errors over seeds at every distance."""
    rows = []
    for dtype in ("float32", "float64"):
        for method in comrope.METHODS:
            for init in INITS if method_class(method).learns else INITS[:1]:
                found = [
                    [
                        errors(method, init, far, getattr(torch, dtype), seed)
                        for seed in range(SEEDS)
                    ]
                    for far in DISTANCES
                ]
                largest = [[max(kind) for kind in zip(*seeds, strict=True)] for seeds in found]
                rows.append({
                    "method": method, "init": init, "positions": dtype,
                    "scores": [score for score, _ in largest],
                    "lengths": [length for _, length in largest],
                })  # fmt: skip
                print(dtype, method, init, *(f"{score:.0e}" for score, _ in largest), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    result = {"machine": machine(torch.device("cpu")), "distances": DISTANCES, "rows": measure()}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
