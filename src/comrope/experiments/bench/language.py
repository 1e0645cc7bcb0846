"""Language models: a block of Llama's shape, and a swapped Llama of Hugging Face.

Shapes: T tokens, N axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comrope.experiments.bench.cases import (
    Setting,
    llama_positions,
    llama_rotary,
    llama_shape,
    perturb_angles,
)
from comrope.experiments.bench.networks import NONE, Maker, candidates_of, from_gradient
from comrope.experiments.bench.rivals import HuggingFaceRoPE, Rival
from comrope.experiments.bench.rotations import HUGGING_FACE
from comrope.experiments.bench.runner import Baseline, Part
from comrope.experiments.common.distributed import autocast
from comrope.experiments.common.timing import Cast, cross_entropy_backward
from comrope.integrations import fold, swap

__all__ = ["LlamaBlock", "llama_block", "llama_model"]

STOCK = "as Hugging Face has it"


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


def llama_block(setting: Setting) -> Part:
    """Return the part for a block of a language model."""
    shape = llama_shape(setting)
    width = shape.heads * shape.head_dim
    x = torch.randn(1, shape.tokens, width, device=setting.device).to(setting.dtype)
    inputs = (x.requires_grad_(), llama_positions(setting))
    rotations: list[tuple[str, str, str, Callable[[], nn.Module] | None]] = [
        (NONE, "none", "", None),
        (HUGGING_FACE, "rope", "", lambda: HuggingFaceRoPE(shape)),
    ]
    for method in ("rope-mixed", "comrope-ld", "comrope-torus"):
        rotary = partial(llama_rotary, setting, method, "auto")
        rotations.append((method, method, "auto", rotary))
    makers: list[Maker] = [
        (name, method, backend, partial(LlamaBlock, setting, rotation))
        for name, method, backend, rotation in rotations
    ]
    backward = partial(from_gradient, torch.randn_like(x))
    candidates = candidates_of(setting, makers, inputs, backward, cast=_no_cast(setting))
    title = f"A Llama-shaped block ({shape.tokens} tokens, width {width}, {setting.dtype_name})"
    baselines = (Baseline("none", NONE), Baseline("Hugging Face", HUGGING_FACE))
    return Part("llama", title, NONE, candidates, baselines)


class Causal(nn.Module):
    """A language model, from tokens to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> Iterable[nn.Module]:
        return self.model.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def llama_model(setting: Setting) -> Part:
    """Return the part for a language model in the measured dtype; angles stay float32."""
    sizes = setting.language
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(sizes["vocab_size"], (1, sizes["tokens"] + 1), generator=generator)
    tokens = tokens.to(setting.device)
    inputs, backward = (tokens[:, :-1],), partial(_next_tokens, tokens[:, 1:])

    def made(method: str = "", folded: bool = False) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config: dict[str, Any] = {key: size for key, size in sizes.items() if key != "tokens"}
        with setting.device:  # drawing a billion random numbers is slow on a CPU
            model: Any = LlamaForCausalLM(LlamaConfig(**config))
        model.to(dtype=setting.dtype).set_attn_implementation(_causal_attention())
        if method:
            perturb_angles(swap(model, method, block_size=8))
        return Causal(fold(model) if folded else model)

    makers: list[Maker] = [
        (STOCK, "rope", "", made),
        *((m, m, "auto", partial(made, m)) for m in ("comrope-ld", "comrope-torus")),
        ("comrope-ld, folded", "comrope-ld", "auto", partial(made, "comrope-ld", folded=True)),
    ]
    candidates = candidates_of(setting, makers, inputs, backward, cast=_no_cast(setting))
    title = (
        f"A Llama of {sizes['num_hidden_layers']} layers ({sizes['tokens']} tokens, width "
        f"{sizes['hidden_size']}, {setting.dtype_name})"
    )
    return Part("language", title, STOCK, candidates, (Baseline("stock", STOCK),))


def _causal_attention() -> str:
    """Register SDPA attention that is always causal; return its name.

    Hugging Face's own mask synchronizes with the GPU to find packed sequences, and assumes them
    during the recording of a CUDA graph.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    name = "always_causal"
    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    return name


def _no_cast(setting: Setting) -> Cast:
    """Return a cast that does nothing: the weights have the measured dtype."""
    return partial(autocast, "no", setting.device)


def _next_tokens(targets: Tensor, logits: Tensor) -> None:
    cross_entropy_backward(targets.flatten(), logits.flatten(0, 1))
