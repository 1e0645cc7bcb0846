"""Networks around a rotation: an attention layer, a whole ViT, a Llama's block.

Shapes: B batch, T tokens, C width, N axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from typing import cast as cast_type

import torch
from torch import Tensor, nn

from comrope.analysis import rotary_modules
from comrope.experiments.bench.parity import network_parity
from comrope.experiments.bench.rivals import (
    PLAIN,
    RIVALS,
    HuggingFaceRoPE,
    PlainRoPE,
    Rival,
    RivalAttention,
)
from comrope.experiments.bench.rotations import HUGGING_FACE
from comrope.experiments.bench.runner import Baseline, Candidate, Part, Subject
from comrope.experiments.bench.setting import (
    Setting,
    Shape,
    block_size_of,
    colour_of,
    llama_positions,
    llama_rotary,
    llama_shape,
    name_of,
    own_rotation,
    shape_of,
    stir,
    token_positions,
    used_backend,
)
from comrope.experiments.distributed import autocast
from comrope.experiments.evaluate import compile_blocks
from comrope.experiments.timing import (
    Cast,
    cross_entropy_backward,
    inference_step,
    training_step,
)
from comrope.methods import METHODS
from comrope.models import ViT, create_model
from comrope.models.attention import Attention

__all__ = ["LlamaBlock", "attention", "llama_block", "vit"]

NONE, APE = "none", "APE"
TIMM = "timm APE, whole model"
PRECISION = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}
CLASSES = 1000
Maker = tuple[str, str, str, Callable[[], nn.Module]]  # a row's name, method, backend, and itself
# Every method by the backend that comes of itself, and the paper's own way once, never compiled.
OWN = (*((method, "auto") for method in METHODS), ("comrope-ld", "reference"))


class AddedPositions(nn.Module):
    """APE before an attention layer that has no positions."""

    def __init__(self, attention: Attention, tokens: int) -> None:
        super().__init__()
        self.attention = attention
        self.codebook = nn.Parameter(0.02 * torch.randn(tokens, attention.qkv.in_features))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.attention(x + self.codebook, positions)


class LlamaBlock(nn.Module):
    """A block of Llama 3's shape: grouped queries, causal attention, SwiGLU 3.5 times as wide."""

    def __init__(self, setting: Setting, rotation: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        self.heads, self.key_heads = setting.llama_heads, setting.llama_key_heads
        dim, keys = (n * setting.llama_head_dim for n in (self.heads, self.key_heads))
        hidden = 7 * dim // 2
        where: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
        self.norm1, self.norm2 = (nn.RMSNorm(dim, **where) for _ in range(2))
        self.q, self.o = (nn.Linear(dim, dim, bias=False, **where) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, keys, bias=False, **where) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False, **where) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False, **where)
        self.rotation = None if rotation is None else rotation()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = self.norm1(x)
        sizes = (self.heads, self.key_heads, self.key_heads)
        q, k, v = (
            layer(h).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in zip((self.q, self.k, self.v), sizes, strict=True)
        )
        if isinstance(self.rotation, Rival):
            q, k = self.rotation(q, k)
        elif self.rotation is not None:
            q, k = self.rotation(q, k, positions)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def attention(setting: Setting) -> Part:
    """One attention layer of the ViT: projections, rotation, attention."""
    shape = shape_of(setting)
    width = shape.heads * shape.head_dim
    x = torch.randn(setting.batch, shape.tokens, width, device=setting.device)
    inputs = (x.requires_grad_(), token_positions(setting))
    gradient = torch.randn_like(x).to(setting.dtype)

    def plain() -> Attention:
        return Attention(width, shape.heads)

    def turned(method: str, backend: str) -> nn.Module:
        return Attention(width, shape.heads, rope=own_rotation(setting, method, backend))

    def rival(make: Callable[[Shape], Rival]) -> nn.Module:
        return RivalAttention(plain(), make(shape))

    makers: list[Maker] = [
        (NONE, "none", "", plain),
        (APE, "ape", "", lambda: AddedPositions(plain(), shape.tokens)),
        *((name, colour_of(name), "", partial(rival, make)) for name, make in RIVALS.items()),
        *((name_of(m, b), m, b, partial(turned, m, b)) for m, b in OWN),
    ]
    candidates = [
        Candidate(
            name,
            partial(_subject, setting, make, inputs, partial(_from, gradient), compiled=compiled),
            method,
            backend,
            compiled=compiled,
        )
        for name, method, backend, make in makers
        for compiled in _modes(setting, backend)
    ]
    title = (
        f"One attention layer (batch {setting.batch}, {shape.tokens} tokens, width {width}, "
        f"{setting.dtype_name})"
    )
    return Part("attention", title, NONE, candidates, _baselines())


def vit(setting: Setting) -> Part:
    """A whole ViT: a training step without the optimizer, and inference."""
    pixels = [16 * size for size in setting.grid]
    images = torch.randn(setting.batch, 3, *pixels, device=setting.device)
    targets = torch.randint(CLASSES, (setting.batch,), device=setting.device)
    backward = partial(cross_entropy_backward, targets)
    noisy = token_positions(setting, per_sample=True)
    candidates = []
    for name, method, backend, make in _vits(setting):
        per_sample = name.endswith("per sample")
        kind, inputs = ("per sample", (images, noisy)) if per_sample else ("shared", (images,))
        for compiled in _modes(setting, backend):
            build = partial(_subject, setting, make, inputs, backward, compiled=compiled)
            candidates.append(Candidate(name, build, method, backend, kind, compiled))
    size = "x".join(map(str, pixels))
    title = (
        f"ViT-{setting.size}/16, {setting.depth} layers ({size} px, batch {setting.batch}, "
        f"{setting.dtype_name})"
    )
    baselines = (*_baselines(), Baseline("timm APE", TIMM, only="timm"))
    return Part("vit", title, NONE, candidates, baselines)


def _vits(setting: Setting) -> list[Maker]:
    pixels = [16 * size for size in setting.grid]
    sizes: dict[str, Any] = {"depth": setting.depth, "num_classes": CLASSES}

    def own(position: str, backend: str = "") -> ViT:
        options: dict[str, Any] = {"position": position, "img_size": pixels, **sizes}
        if backend:
            options |= {"block_size": block_size_of(position), "backend": backend}
        model = create_model(f"vit_{setting.size}_patch16_224", **options)
        stir(model)
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
        (
            name_of("comrope-ld", "auto", "per sample"),
            "comrope-ld",
            "auto",
            partial(own, "comrope-ld", "auto"),
        ),
        (TIMM, "ape", "", partial(timm, "")),
        ("timm axial RoPE, whole model", "rope", "", partial(timm, "rope_")),
        ("timm RoPE-Mixed, whole model", "rope-mixed", "", partial(timm, "rope_mixed_")),
    ]


def llama_block(setting: Setting) -> Part:
    """A block of a language model, where the rotation is one thing among many."""
    shape = llama_shape(setting)
    width = shape.heads * shape.head_dim
    x = torch.randn(1, shape.tokens, width, device=setting.device).to(setting.dtype)
    inputs = (x.requires_grad_(), llama_positions(setting))
    gradient = torch.randn_like(x)
    rotations: list[tuple[str, str, str, Callable[[], nn.Module] | None]] = [
        (NONE, "none", "", None),
        (HUGGING_FACE, "rope", "", lambda: HuggingFaceRoPE(shape)),
    ]
    for method in ("rope-mixed", "comrope-ld", "comrope-torus"):
        rotary = partial(llama_rotary, setting, method, "auto")
        rotations.append((method, method, "auto", rotary))
    candidates = [
        Candidate(
            name,
            partial(
                _subject,
                setting,
                partial(LlamaBlock, setting, rotation),
                inputs,
                partial(_from, gradient),
                cast=partial(autocast, "no", setting.device),  # the weights are narrow themselves
                compiled=compiled,
            ),
            method,
            backend,
            compiled=compiled,
        )
        for name, method, backend, rotation in rotations
        for compiled in setting.modes
    ]
    title = f"A Llama-shaped block ({shape.tokens} tokens, width {width}, {setting.dtype_name})"
    baselines = (Baseline("none", NONE), Baseline("Hugging Face", HUGGING_FACE))
    return Part("llama", title, NONE, candidates, baselines)


def _subject(
    setting: Setting,
    make: Callable[[], nn.Module],
    inputs: Sequence[Tensor],
    backward: Callable[[Tensor], None],
    *,
    compiled: bool,
    cast: Cast | None = None,
) -> Subject:
    torch.manual_seed(0)
    module = make().to(setting.device)
    cast = cast or partial(autocast, PRECISION[setting.dtype], setting.device)
    ran = next((used_backend(rope, setting) for rope in rotary_modules(module).values()), "")
    if compiled and hasattr(module, "blocks"):  # a ViT, ours or timm's, for its own sizes alone
        compile_blocks(module, dynamic=False)
    elif compiled:
        module.compile(dynamic=False)
    return Subject(
        {
            "forward": partial(inference_step, cast, module, inputs),
            "step": partial(training_step, cast, module, inputs, backward),
        },
        partial(network_parity, module, inputs, cast, _make_exact, compiled=compiled),
        ran=ran,
    )


def _make_exact(module: nn.Module) -> None:
    """Every rotation in it as its plainest statement: matrix exponentials, or the rival's own."""
    for rotary in rotary_modules(module).values():
        rotary.backend = "reference"
    for part in module.modules():
        if isinstance(part, Rival):
            part.stated = True


def _from(gradient: Tensor, output: Tensor) -> None:
    output.backward(gradient)


def _baselines() -> tuple[Baseline, ...]:
    return Baseline("none", NONE), Baseline("vanilla", PLAIN)


def _modes(setting: Setting, backend: str) -> tuple[bool, ...]:
    return (False,) if backend == "reference" else setting.modes
