"""Comparisons for a CPU: the rotation of one layer, steps of a ViT, one decoded token.

All rows of a comparison are timed in the same rounds, eager and compiled ones.

Shapes: B batch, H heads, T tokens, D head dimension, N axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from comrope import positions as coordinates
from comrope.analysis import rotary_modules
from comrope.experiments.bench.cases import (
    Setting,
    block_size_of,
    color_method,
    own_rotation,
    perturb_angles,
    shape_of,
    used_backend,
)
from comrope.experiments.bench.networks import (
    NONE,
    TIMM,
    TIMM_AXIAL_VIT,
    TIMM_MIXED_VIT,
    Maker,
    candidates_of,
    vits,
)
from comrope.experiments.bench.parity import Verdict, outputs_parity
from comrope.experiments.bench.rivals import (
    PLAIN,
    RIVALS,
    TIMM_AXIAL,
    TIMM_MIXED,
    CopyOfInputs,
)
from comrope.experiments.bench.rotations import (
    COMMUTING,
    Layer,
    described,
    rival_benchmark,
    rotation_benchmark,
)
from comrope.experiments.bench.runner import Baseline, Benchmark, Candidate, Part
from comrope.experiments.common.timing import cross_entropy_backward
from comrope.integrations import fold
from comrope.models.gpt import GPT

__all__ = [
    "COPY_QK",
    "FOLDED",
    "decode",
    "large_step",
    "layer",
    "layer_bfloat16",
    "only_calls",
    "step",
]

COPY_QK = "copy of q and k"
FOLDED = "comrope-ld, folded"
VITS = (NONE, *COMMUTING, TIMM, TIMM_AXIAL_VIT, TIMM_MIXED_VIT)
LARGE = (NONE, *COMMUTING, TIMM, TIMM_MIXED_VIT)  # at the larger batch
CLASSES = 1000
ROUNDS, LARGE_ROUNDS = 2, 1  # of a ViT, in each repetition


def layer(setting: Setting) -> Part:
    """Return the part for the rotation of one ViT-B layer: every method, and other libraries.

    q and k are contiguous, and there is no class token. Ratios are to timm's rotations: to the
    learned one, and to the fixed one.
    """
    setting = replace(setting, size="base")
    rows, columns = setting.grid
    shape = shape_of(setting)._replace(tokens=rows * columns)
    inputs = Layer(*(x.contiguous() for x in Layer.random(shape, shape.heads, setting.batch)))
    positions = coordinates.grid(setting.grid, device=setting.device)
    rivals = {COPY_QK: CopyOfInputs, **RIVALS}
    del rivals[PLAIN]
    candidates = [
        Candidate(
            name,
            partial(rival_benchmark, inputs, make, shape, compiled),
            "none" if name == COPY_QK else color_method(name),
            compiled=compiled,
        )
        for name, make in rivals.items()
        for compiled in setting.modes
    ]
    for method in COMMUTING:
        make = partial(own_rotation, setting, method)
        for compiled in setting.modes:
            build = partial(rotation_benchmark, inputs, setting, make, "auto", positions, compiled)
            candidates.append(Candidate(method, build, method, "auto", compiled=compiled))
    title = f"Rotation of one layer ({described(inputs, setting)})"
    baselines = (
        Baseline("timm RoPE-Mixed", TIMM_MIXED),
        Baseline("timm axial", TIMM_AXIAL),
    )
    return Part("layer", title, TIMM_MIXED, candidates, baselines, together=True)


def layer_bfloat16(setting: Setting) -> Part:
    """Return the same part in bfloat16; an empty one if ``layer`` is in bfloat16 already."""
    part = layer(replace(setting, dtype=torch.bfloat16))
    return replace(part, candidates=[]) if setting.dtype == torch.bfloat16 else part


def step(setting: Setting) -> Part:
    """Return the part for a ViT at half of the batch: a training step, and inference."""
    return _steps(setting, max(1, setting.batch // 2), VITS, ("forward", "step"), ROUNDS)


def large_step(setting: Setting) -> Part:
    """Return the part for a ViT at twice the batch: a training step only."""
    return _steps(setting, 2 * setting.batch, LARGE, ("step",), LARGE_ROUNDS)


def _steps(
    setting: Setting, batch: int, names: Sequence[str], calls: Sequence[str], rounds: int
) -> Part:
    pixels = [16 * size for size in setting.grid]
    images = torch.randn(batch, 3, *pixels, device=setting.device)
    targets = torch.randint(CLASSES, (batch,), device=setting.device)
    backward = partial(cross_entropy_backward, targets)
    makers = [maker for maker in vits(setting) if maker[0] in names]
    of = {name: make for name, _, _, make in makers}
    candidates = [
        replace(candidate, build=partial(only_calls, candidate.build, calls))
        for candidate in candidates_of(setting, makers, (images,), backward)
    ]
    if "forward" in calls:
        folded: Maker = (FOLDED, "comrope-ld", "", lambda: fold(of["comrope-ld"]()))
        candidates += [
            replace(candidate, build=partial(only_calls, candidate.build, ("forward",)))
            for candidate in candidates_of(setting, [folded], (images,), backward)
        ]
    size = "x".join(map(str, pixels))
    title = (
        f"ViT-{setting.size}/16, {setting.depth} layers ({size} px, batch {batch}, "
        f"{setting.dtype_name})"
    )
    baselines = (Baseline("none", NONE), Baseline("timm APE", TIMM, only="timm"))
    return Part("step", title, NONE, candidates, baselines, together=True, rounds=rounds)


def only_calls(build: Callable[[], Benchmark], calls: Sequence[str]) -> Benchmark:
    """Build a benchmark that times some of the calls."""
    benchmark = build()
    return replace(benchmark, calls={key: benchmark.calls[key] for key in calls})


class Decoder(nn.Module):
    """Compute the logits of one token, with the keys and values of the tokens before in a cache."""

    def __init__(self, model: GPT, tokens: Tensor) -> None:
        super().__init__()
        self.model, self.before = model.eval(), tokens.shape[1] - 1
        self.cache = model.new_cache(*tokens.shape)
        model(tokens[:, :-1], cache=self.cache, last_only=True)

    def forward(self, token: Tensor) -> Tensor:
        """Return the logits (B, 1, V) of a token (B, 1)."""
        self.cache.length = self.before
        return cast(Tensor, self.model(token, cache=self.cache, last_only=True))


def decode(setting: Setting) -> Part:
    """Return the part for one decoded token of a GPT, eager; ratios are to no positions."""
    sizes = setting.language
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(sizes["vocab_size"], (1, sizes["tokens"]), generator=generator)
    candidates = [
        Candidate(name, partial(_decoded, setting, name, tokens.to(setting.device)), name)
        for name in (NONE, *COMMUTING)
    ]
    title = (
        f"One decoded token of a GPT of {sizes['num_hidden_layers']} layers (width "
        f"{sizes['hidden_size']}, {sizes['tokens']} tokens in the cache, {setting.dtype_name})"
    )
    return Part("decode", title, NONE, candidates, (Baseline("none", NONE),), together=True)


def _decoded(setting: Setting, position: str, tokens: Tensor) -> Benchmark:
    torch.manual_seed(0)
    sizes = setting.language
    gpt = GPT(
        vocab_size=sizes["vocab_size"],
        context=sizes["tokens"],
        embed_dim=sizes["hidden_size"],
        depth=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        position=position,
        block_size=8 if position == NONE else block_size_of(position),
    ).to(setting.device, setting.dtype)
    perturb_angles(gpt)
    ropes = rotary_modules(gpt).values()
    decoder, last = Decoder(gpt, tokens), tokens[:, -1:]

    def call() -> Tensor:
        return decoder(last)

    def check() -> Verdict:
        """Compare with all tokens at once, without a cache and by Algorithm 1."""
        return outputs_parity(call, gpt, partial(_all_at_once, tokens=tokens))

    ran = next((used_backend(rope, setting) for rope in ropes), "")
    return Benchmark({"forward": call}, check, ran=ran)


def _all_at_once(model: nn.Module, tokens: Tensor) -> Tensor:
    for rope in rotary_modules(model).values():
        rope.backend = "reference"
    return cast(Tensor, model(tokens, last_only=True))
