"""Networks with a rotation: an attention layer and a ViT.

Shapes: B batch, T tokens, C width, N axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from typing import cast as cast_type

import torch
from torch import Tensor, nn

from comrope.analysis import rotary_modules
from comrope.experiments.bench.cases import (
    Setting,
    Shape,
    block_size_of,
    color_method,
    name_of,
    own_rotation,
    perturb_angles,
    shape_of,
    token_positions,
    used_backend,
)
from comrope.experiments.bench.parity import network_parity
from comrope.experiments.bench.rivals import (
    PLAIN,
    RIVALS,
    PlainRoPE,
    Rival,
    RivalAttention,
)
from comrope.experiments.bench.runner import Baseline, Benchmark, Candidate, Part
from comrope.experiments.common.distributed import autocast
from comrope.experiments.common.timing import (
    Cast,
    cross_entropy_backward,
    inference_step,
    training_step,
)
from comrope.experiments.tasks.base import compile_blocks
from comrope.methods import METHODS
from comrope.models import ViT, create_model
from comrope.models.attention import Attention

__all__ = [
    "NONE",
    "TIMM",
    "TIMM_AXIAL_VIT",
    "TIMM_MIXED_VIT",
    "Maker",
    "attention",
    "candidates_of",
    "from_gradient",
    "vit",
    "vits",
]

NONE, APE = "none", "APE"
TIMM = "timm APE, whole model"
TIMM_AXIAL_VIT, TIMM_MIXED_VIT = "timm axial RoPE, whole model", "timm RoPE-Mixed, whole model"
PRECISION = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}
CLASSES = 1000
ROTATED_VALUES = {"rotate_values": True}
Maker = tuple[str, str, str, Callable[[], nn.Module]]  # name of a row, method, backend, constructor
# Every method with the default backend, and the paper's Algorithm 1 once, only eager.
OWN = (*((method, "auto") for method in METHODS), ("comrope-ld", "reference"))


class AddedPositions(nn.Module):
    """An attention layer without a rotation, with APE added to its input."""

    def __init__(self, attention: Attention, tokens: int) -> None:
        super().__init__()
        self.attention = attention
        self.codebook = nn.Parameter(0.02 * torch.randn(tokens, attention.qkv.in_features))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.attention(x + self.codebook, positions)


def attention(setting: Setting) -> Part:
    """Return the part for one attention layer of the ViT: projections, rotation, attention."""
    shape = shape_of(setting)
    width = shape.heads * shape.head_dim
    x = torch.randn(setting.batch, shape.tokens, width, device=setting.device)
    inputs = (x.requires_grad_(), token_positions(setting))
    backward = partial(from_gradient, torch.randn_like(x).to(setting.dtype))

    def plain() -> Attention:
        return Attention(width, shape.heads)

    def rotated(method: str, backend: str) -> nn.Module:
        return Attention(width, shape.heads, rope=own_rotation(setting, method, backend))

    def rival(make: Callable[[Shape], Rival]) -> nn.Module:
        return RivalAttention(plain(), make(shape))

    makers: list[Maker] = [
        (NONE, "none", "", plain),
        (APE, "ape", "", lambda: AddedPositions(plain(), shape.tokens)),
        *((name, color_method(name), "", partial(rival, make)) for name, make in RIVALS.items()),
        *((name_of(m, b), m, b, partial(rotated, m, b)) for m, b in OWN),
    ]
    candidates = candidates_of(setting, makers, inputs, backward)
    title = (
        f"One attention layer (batch {setting.batch}, {shape.tokens} tokens, width {width}, "
        f"{setting.dtype_name})"
    )
    return Part("attention", title, NONE, candidates, _baselines())


def vit(setting: Setting) -> Part:
    """Return the part for a ViT: inference, and a training step without the optimizer."""
    pixels = [16 * size for size in setting.grid]
    images = torch.randn(setting.batch, 3, *pixels, device=setting.device)
    targets = torch.randint(CLASSES, (setting.batch,), device=setting.device)
    backward = partial(cross_entropy_backward, targets)
    makers = vits(setting)
    candidates = candidates_of(setting, makers, (images,), backward)
    per_sample = candidates_of(
        setting,
        [(f"{n}, per sample", m, b, make) for n, m, b, make in makers if n == "comrope-ld"],
        (images, token_positions(setting, per_sample=True)),
        backward,
        positions="per sample",
    )
    size = "x".join(map(str, pixels))
    title = (
        f"ViT-{setting.size}/16, {setting.depth} layers ({size} px, batch {setting.batch}, "
        f"{setting.dtype_name})"
    )
    baselines = (*_baselines(), Baseline("timm APE", TIMM, only="timm"))
    return Part("vit", title, NONE, [*candidates, *per_sample], baselines)


def vits(setting: Setting) -> list[Maker]:
    """Return every ViT of the benchmark: ours, and whole models of timm."""
    pixels = [16 * size for size in setting.grid]
    sizes: dict[str, Any] = {"depth": setting.depth, "num_classes": CLASSES}

    def own(position: str, backend: str = "", **more: bool) -> ViT:
        options: dict[str, Any] = {"position": position, "img_size": pixels, **sizes, **more}
        if backend:
            options |= {"block_size": block_size_of(position), "backend": backend}
        model = create_model(f"vit_{setting.size}_patch16_224", **options)
        perturb_angles(model)
        return model

    def plain() -> ViT:
        model, rival = own("none"), PlainRoPE.of(shape_of(setting))
        for block in model.blocks:
            block.attn = RivalAttention(cast_type(Attention, block.attn), rival)
        return model

    def timm(kind: str) -> nn.Module:
        import timm as library

        name = f"vit_{setting.size}_patch16_{kind}224"
        return library.create_model(name, img_size=tuple(pixels), **sizes)

    return [
        (NONE, "none", "", partial(own, "none")),
        (APE, "ape", "", partial(own, "ape")),
        (PLAIN, "rope", "", plain),
        *((name_of(m, b), m, b, partial(own, m, b)) for m, b in OWN),
        *(
            (
                f"{method}, rotated values",
                method,
                "auto",
                partial(own, method, "auto", **ROTATED_VALUES),
            )
            for method in ("rope", "comrope-torus")
        ),
        (TIMM, "ape", "", partial(timm, "")),
        (TIMM_AXIAL_VIT, "rope", "", partial(timm, "rope_")),
        (TIMM_MIXED_VIT, "rope-mixed", "", partial(timm, "rope_mixed_")),
    ]


def candidates_of(
    setting: Setting,
    makers: Iterable[Maker],
    inputs: Sequence[Tensor],
    backward: Callable[[Tensor], None],
    *,
    cast: Cast | None = None,
    positions: str = "shared",
) -> list[Candidate]:
    """Return eager and compiled candidates, by default with autocast to the measured dtype."""
    given = {"cast": cast or partial(autocast, PRECISION[setting.dtype], setting.device)}
    return [
        Candidate(
            name,
            partial(_benchmark, setting, make, inputs, backward, **given, compiled=compiled),
            method,
            backend,
            positions,
            compiled,
        )
        for name, method, backend, make in makers
        for compiled in _modes(setting, backend)
    ]


def _benchmark(
    setting: Setting,
    make: Callable[[], nn.Module],
    inputs: Sequence[Tensor],
    backward: Callable[[Tensor], None],
    *,
    compiled: bool,
    cast: Cast,
) -> Benchmark:
    torch.manual_seed(0)
    module = make().to(setting.device)
    ran = next((used_backend(rope, setting) for rope in rotary_modules(module).values()), "")
    if compiled and hasattr(module, "blocks"):  # a ViT, ours or timm's
        compile_blocks(cast_type(nn.ModuleList, module.blocks), dynamic=False)
    elif compiled:
        module.compile(dynamic=False)
    return Benchmark(
        {
            "forward": partial(inference_step, cast, module, inputs),
            "step": partial(training_step, cast, module, inputs, backward),
        },
        partial(network_parity, module, inputs, cast, _make_exact, compiled=compiled),
        ran=ran,
    )


def _make_exact(module: nn.Module) -> None:
    """Switch every rotation to its reference implementation."""
    for rotary in rotary_modules(module).values():
        rotary.backend = "reference"
    for part in module.modules():
        if isinstance(part, Rival):
            part.use_definition = True


def from_gradient(gradient: Tensor, output: Tensor) -> None:
    output.backward(gradient)


def _baselines() -> tuple[Baseline, ...]:
    return Baseline("none", NONE), Baseline("vanilla", PLAIN)


def _modes(setting: Setting, backend: str) -> tuple[bool, ...]:
    return (False,) if backend == "reference" else setting.modes
