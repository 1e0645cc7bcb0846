"""Time and memory of a rotation over its sizes: tokens, heads, block size, axes and batch.

One size differs at a time from ``BASE``. A copy of the same tensors shows what memory alone costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from comrope.experiments.bench.cases import Setting, Shape, perturb_angles
from comrope.experiments.bench.cpu import COPY_QK, only_calls
from comrope.experiments.bench.rivals import CopyOfInputs
from comrope.experiments.bench.rotations import Layer, rival_benchmark, rotation_benchmark
from comrope.experiments.bench.runner import Benchmark, Candidate, Part
from comrope.rotary import RotaryEmbedding

__all__ = ["BASE", "METHODS", "SWEEPS", "sizes"]

METHODS = ("comrope-ld", "rope-mixed")
HEAD_DIM = 64
BASE = {"tokens": 784, "heads": 12, "block_size": 8, "axes": 2, "batch": 4}
SWEEPS = {
    "tokens": (196, 784, 3136, 12544, 16384),
    "heads": (3, 12, 24),
    "block_size": (2, 4, 8, 16),
    "axes": (1, 2, 3),
    "batch": (1, 4, 16),
}
ROUNDS = 2  # in each repetition
MOST_TOKENS = 784  # of the check by Algorithm 1, which needs a matrix for each token and block


def sizes(setting: Setting) -> Part:
    """Return the part for the rotation of one layer at many sizes, eager."""
    candidates = []
    for chosen in _all_sizes(setting):
        shape = Shape(
            chosen["tokens"], chosen["heads"], HEAD_DIM, (), setting.device, setting.dtype
        )
        inputs = Layer.random(shape, shape.heads, chosen["batch"])
        inputs = Layer(*(x.contiguous() for x in inputs))
        for method in METHODS:
            if method != "rope-mixed" or chosen["block_size"] == BASE["block_size"]:
                build = partial(_benchmark, inputs, setting, method, chosen)
                candidates.append(Candidate(method, build, method, "auto", sizes=chosen))
        if chosen["block_size"] == BASE["block_size"] and chosen["axes"] == BASE["axes"]:
            build = partial(_copy, inputs, shape)
            candidates.append(Candidate(COPY_QK, build, "none", sizes=chosen))
    title = f"Rotation of one layer over its sizes ({setting.dtype_name})"
    return Part("sizes", title, COPY_QK, candidates, (), together=True, rounds=ROUNDS)


def _all_sizes(setting: Setting) -> Iterator[dict[str, int]]:
    """Yield every combination of sizes once; small grids have few tokens, for trials."""
    most = max(BASE["tokens"], 100 * setting.grid[0] * setting.grid[1])
    seen = []
    for name, values in SWEEPS.items():
        for value in values:
            chosen = BASE | {name: value}
            if chosen not in seen and chosen["tokens"] <= most:
                seen.append(chosen)
                yield chosen


def _benchmark(inputs: Layer, setting: Setting, method: str, chosen: dict[str, int]) -> Benchmark:
    def make(backend: str) -> RotaryEmbedding:
        torch.manual_seed(0)
        rope = RotaryEmbedding(
            method,
            num_heads=chosen["heads"],
            head_dim=HEAD_DIM,
            num_axes=chosen["axes"],
            block_size=2 if method == "rope-mixed" else chosen["block_size"],
            backend=backend,
            device=setting.device,
        )
        perturb_angles(rope)
        return rope

    generator = torch.Generator(setting.device).manual_seed(0)
    shape = chosen["tokens"], chosen["axes"]
    positions = torch.rand(shape, generator=generator, device=setting.device)
    exact = "reference" if chosen["tokens"] <= MOST_TOKENS else "spectral"
    found = rotation_benchmark(inputs, setting, make, "auto", positions, exact_backend=exact)
    return only_calls(lambda: found, ("step",))


def _copy(inputs: Layer, shape: Shape) -> Benchmark:
    return only_calls(lambda: rival_benchmark(inputs, CopyOfInputs, shape), ("step",))
