"""Rotations without a network: of a ViT layer, of a Llama layer, and LieRE.

Queries and keys have the memory layout of attention: slices of one projection, token by token.

Shapes: B batch, H heads, G queries a key head, T tokens, D head dimension, N axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comrope import ops
from comrope.experiments.bench.cases import (
    Setting,
    Shape,
    block_size_of,
    color_method,
    llama_positions,
    llama_rotary,
    llama_shape,
    name_of,
    own_rotation,
    shape_of,
    token_positions,
    used_backend,
)
from comrope.experiments.bench.parity import Rotation, Verdict, rotation_parity, watched_samples
from comrope.experiments.bench.rivals import PLAIN, RIVALS, HuggingFaceRoPE, Rival
from comrope.experiments.bench.runner import Baseline, Benchmark, Candidate, Part
from comrope.methods import METHODS, method_class
from comrope.rotary import RotaryEmbedding

__all__ = [
    "COMMUTING",
    "COPY",
    "HUGGING_FACE",
    "Layer",
    "described",
    "liere",
    "llama_rotation",
    "rival_benchmark",
    "rotation",
    "rotation_benchmark",
]

COPY = "copying memory"
HUGGING_FACE = "Hugging Face RoPE"
PRECOMPUTED = "precomputed angles"
BACKENDS = tuple(backend for backend in ops.BACKENDS if backend != "auto")
COMMUTING = tuple(method for method in METHODS if method_class(method).commutes)


class Layer(NamedTuple):
    """Inputs of one layer's rotation, and the gradients of its outputs."""

    q: Tensor  # (B, H G, T, D)
    k: Tensor  # (B, H, T, D)
    grad_q: Tensor
    grad_k: Tensor

    @classmethod
    def random(cls, shape: Shape, key_heads: int, batch: int) -> Layer:
        generator = torch.Generator(shape.device).manual_seed(0)

        def draw(*sizes: int) -> Tensor:
            drawn = torch.randn(
                batch, shape.tokens, *sizes, generator=generator, device=shape.device
            )
            return drawn.to(shape.dtype).transpose(1, -2)

        heads, dim = shape.heads, shape.head_dim
        if key_heads == heads:  # one projection to q, k and v, as in a ViT
            q, k, _ = draw(3, heads, dim).unbind(2)
        else:
            q, k = draw(heads, dim), draw(key_heads, dim)
        return cls(q, k, draw(heads, dim), draw(key_heads, dim))

    def benchmark(
        self,
        rotate: Rotation,
        angles: Sequence[Tensor],
        check: Callable[[], Verdict],
        ran: str = "",
    ) -> Benchmark:
        """Return the benchmark of a rotation, with the bytes that must move.

        Forward: q and k in and out. Backward: their gradients in and out, and for learned angles
        the rotated q and k in.
        """
        size = sum(x.numel() * x.element_size() for x in (self.q, self.k))
        q, k = (x.detach().requires_grad_() for x in (self.q, self.k))
        inputs = [q, k, *angles]

        def forward() -> Any:
            with torch.no_grad():
                return rotate(self.q, self.k)

        def step() -> Any:
            return torch.autograd.grad(rotate(q, k), inputs, (self.grad_q, self.grad_k))

        moved = {"forward": 2 * size, "step": (5 if angles else 4) * size}
        return Benchmark({"forward": forward, "step": step}, check, moved, ran)


def rotation(setting: Setting) -> Part:
    """Return the part for one ViT layer: every method, backend and kind of positions."""
    shape = shape_of(setting)
    layer = Layer.random(shape, shape.heads, setting.batch)
    candidates = [_copy(setting)]
    for name, make in RIVALS.items():
        for compiled in setting.modes:
            build = partial(rival_benchmark, layer, make, shape, compiled)
            candidates.append(Candidate(name, build, color_method(name), compiled=compiled))
    for method in COMMUTING:
        for backend in BACKENDS:
            kinds = ["shared", "per sample"]
            if backend == "reference" and method != "comrope-ld":  # one slow row is enough
                kinds.remove("per sample")
            for kind in kinds:
                per_sample = kind == "per sample"
                build = partial(_own_benchmark, layer, setting, method, backend, per_sample)
                name = name_of(method, backend, kind)
                candidates.append(Candidate(name, build, method, backend, kind))
        if block_size_of(method) > 2:
            build = partial(_own_benchmark, layer, setting, method, "auto", precomputed=True)
            candidates.append(Candidate(f"{method}, {PRECOMPUTED}", build, method, "auto"))
        if setting.compile:
            build = partial(_own_benchmark, layer, setting, method, "auto", compiled=True)
            candidates.append(Candidate(name_of(method), build, method, "auto", compiled=True))
    baselines = (Baseline("vanilla", PLAIN, prefer_compiled=True),)
    title = f"Rotation of one layer ({described(layer, setting)})"
    return Part("rotation", title, COPY, candidates, baselines)


def liere(setting: Setting) -> Part:
    """Return the part for LieRE, where every backend computes exponentials."""
    shape = shape_of(setting)
    layer = Layer.random(shape, shape.heads, setting.batch)
    candidates = [_copy(setting)]
    for backend in BACKENDS:
        for compiled in setting.modes:
            build = partial(_own_benchmark, layer, setting, "liere", backend, compiled=compiled)
            name = name_of("liere", backend)
            candidates.append(Candidate(name, build, "liere", backend, compiled=compiled))
    title = f"Rotation of one layer, LieRE ({described(layer, setting)})"
    baselines = (Baseline("matrix_exp", name_of("liere", "reference")),)
    return Part("liere", title, COPY, candidates, baselines)


def llama_rotation(setting: Setting) -> Part:
    """Return the part for a Llama layer: learned angles per key head, and fixed tables."""
    shape = llama_shape(setting)
    layer = Layer.random(shape, setting.llama_key_heads, 1)
    candidates = [_copy(setting)]
    rivals: dict[str, Callable[[Shape], Rival]] = {HUGGING_FACE: HuggingFaceRoPE}
    rivals |= {name: make for name, make in RIVALS.items() if "rotary-embedding" in name}
    for name, make in rivals.items():
        for compiled in setting.modes:
            build = partial(rival_benchmark, layer, make, shape, compiled)
            candidates.append(Candidate(name, build, "rope", compiled=compiled))
    for method in ("comrope-ld", "rope-mixed"):
        for backend in BACKENDS:
            build = partial(_llama_benchmark, layer, setting, method, backend, compiled=False)
            candidates.append(Candidate(name_of(method, backend), build, method, backend))
        if setting.compile:
            build = partial(_llama_benchmark, layer, setting, method, "auto", compiled=True)
            candidates.append(Candidate(name_of(method), build, method, "auto", compiled=True))
    title = f"Rotation of a Llama layer ({described(layer, setting)})"
    baselines = (Baseline("Hugging Face", HUGGING_FACE, prefer_compiled=True),)
    return Part("llama", title, COPY, candidates, baselines)


def _own_benchmark(
    layer: Layer,
    setting: Setting,
    method: str,
    backend: str,
    per_sample: bool = False,
    compiled: bool = False,
    precomputed: bool = False,
) -> Benchmark:
    make = partial(own_rotation, setting, method)
    positions = token_positions(setting, per_sample)
    benchmark = rotation_benchmark(layer, setting, make, backend, positions, compiled)
    return (
        _with_precomputed_angles(layer, make(backend), positions, benchmark)
        if precomputed
        else benchmark
    )


def _llama_benchmark(
    layer: Layer, setting: Setting, method: str, backend: str, compiled: bool
) -> Benchmark:
    make = partial(llama_rotary, setting, method)
    return rotation_benchmark(layer, setting, make, backend, llama_positions(setting), compiled)


def rotation_benchmark(
    layer: Layer,
    setting: Setting,
    make: Callable[[str], RotaryEmbedding],
    backend: str,
    positions: Tensor,
    compiled: bool = False,
    exact_backend: str = "reference",
) -> Benchmark:
    """Return the benchmark of comrope's rotation, checked against ``exact_backend`` in float64."""
    rope, slow = make(backend), make(exact_backend)
    call: Callable[..., Any] = torch.compile(rope, dynamic=False) if compiled else rope
    few = watched_samples(layer.q.shape[0], layer.q[0].numel())
    some = positions if positions.ndim == 2 else positions[few]
    angles, slow_angles = list(rope.parameters()), list(slow.parameters())

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return call(q, k, positions)

    def check() -> Verdict:
        exact = partial(slow, positions=some)
        learned = {"angles": angles, "exact_angles": slow_angles}
        return rotation_parity(rotate, exact, layer.q, layer.k, **learned)

    return layer.benchmark(rotate, angles, check, used_backend(rope, setting))


def _with_precomputed_angles(
    layer: Layer, rope: RotaryEmbedding, positions: Tensor, complete: Benchmark
) -> Benchmark:
    """Return the benchmark of a rotation with precomputed angles, as in a ViT.

    Its check is that of the complete rotation.
    """
    angles = rope.angles().cache_spectrum()
    leaves: dict[str, Any] = {
        name: value.detach().requires_grad_()
        for name, value in angles._asdict().items()
        if isinstance(value, Tensor)
    }
    rotate = partial(rope, positions=positions, angles=angles._replace(**leaves))
    return layer.benchmark(rotate, list(leaves.values()), complete.check, complete.ran)


def rival_benchmark(
    layer: Layer, make: Callable[[Shape], Rival], shape: Shape, compiled: bool = False
) -> Benchmark:
    """Return the benchmark of a rival, checked against its definition in float64."""
    torch.manual_seed(0)
    rival = make(shape)
    call: Any = torch.compile(rival, dynamic=False) if compiled else rival
    learned = [parameter for parameter in rival.parameters() if parameter.requires_grad]

    def check() -> Verdict:
        angles = {"angles": learned, "exact_angles": learned}
        return rotation_parity(call, rival.define, layer.q, layer.k, **angles)

    return layer.benchmark(call, learned, check)


def _copy(setting: Setting) -> Candidate:
    """Return the reference row: a copy of memory."""

    def build() -> Benchmark:
        elements = setting.copied_mib * 2**20 // 4
        source = torch.ones(elements, device=setting.device)
        target = torch.zeros_like(source)

        def copy() -> Tensor:
            return target.copy_(source)

        def check() -> Verdict:
            wrong = int((copy() != 1).sum())
            return Verdict(float(wrong), 0.5, "elements")

        return Benchmark({"forward": copy}, check, {"forward": 2 * 4 * elements})

    return Candidate(COPY, build)


def described(layer: Layer, setting: Setting) -> str:
    """Return the sizes of a layer, for titles."""
    batch, heads, tokens, dim = layer.q.shape
    keys = "" if layer.k.shape[1] == heads else f", {layer.k.shape[1]} key heads"
    return f"batch {batch}, {tokens} tokens, {heads} heads{keys} of {dim}, {setting.dtype_name}"
