"""A GPT with one position encoding: a causal language model on the rotary layer.

Shapes: B batch, T tokens, C channels, H heads of keys, D channels per head, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comrope import _checks
from comrope.analysis import rotary_modules
from comrope.angles import Angles
from comrope.methods import METHODS, batched_angles
from comrope.models.attention import Block
from comrope.models.pretrained import Pretrained
from comrope.models.vit import ROTARY_OPTIONS
from comrope.rotary import RotaryEmbedding

__all__ = ["GPT", "SIZES", "Cache", "create_gpt"]

POSITIONS = (*METHODS, "none")
SHARED = ("none", "heads", "layers", "both")
TEMPERATURES = ("constant", "log")
NOT_ARGUMENTS = ("self", "__class__", "rotary_options")
SIZES: dict[str, dict[str, int]] = {
    "gpt_nano": {"depth": 4, "embed_dim": 128, "num_heads": 4},
    "gpt_micro": {"depth": 6, "embed_dim": 256, "num_heads": 4},
    "gpt_tiny": {"depth": 6, "embed_dim": 384, "num_heads": 6},
    "gpt_small": {"depth": 12, "embed_dim": 768, "num_heads": 12},
    "gpt_medium": {"depth": 24, "embed_dim": 1024, "num_heads": 16},
    "gpt_1b": {"depth": 18, "embed_dim": 2048, "num_heads": 16},
}


class Cache:
    """Rotated keys, and values, of all tokens so far."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.length = keys, values, 0  # (layers, B, H, max_length, D)
        self.angles: list[Angles] | list[None] | None = None


class Causal(NamedTuple):
    """Attend from every query to the keys up to its own token."""

    scale: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    past: int = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped, mask, tokens = q.shape[1] != k.shape[1], None, q.shape[2]
        if self.scale is not None:
            q = (q * self.scale).to(q.dtype)
        if self.keys is not None and self.values is not None:
            end = self.past + tokens
            self.keys[:, :, self.past : end] = k
            self.values[:, :, self.past : end] = v
            k, v = self.keys[:, :, :end], self.values[:, :, :end]
            if self.past and tokens > 1:
                mask = torch.ones(tokens, end, dtype=torch.bool, device=q.device).tril(self.past)
        causal = mask is None and tokens > 1
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )


class GPT(Pretrained):
    """A plain pre-norm GPT with one position encoding."""

    extra_arguments = ROTARY_OPTIONS

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int = 1024,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        num_kv_heads: int | None = None,
        mlp_ratio: float = 4.0,
        tie_embeddings: bool = True,
        position: str = "comrope-ld",
        rotate_values: bool = False,
        share_rotations: str = "none",
        attention_temperature: str = "constant",
        block_size: int = 8,
        init: str = "rope",
        base: float | None = None,
        init_std: float | None = None,
        **rotary_options: Any,
    ) -> None:
        given = {**locals(), **rotary_options}
        super().__init__()
        self._given = {k: given[k] for k in given if k not in NOT_ARGUMENTS}
        self.vocab_size = _checks.integer("vocab_size", vocab_size, 1)
        self.context = _checks.integer("context", context, 2)
        _checks.one_of("position", position, POSITIONS)
        _checks.one_of("share_rotations", share_rotations, SHARED)
        self.attention_temperature = _checks.one_of(
            "attention_temperature", attention_temperature, TEMPERATURES
        )
        kv_heads = num_kv_heads or num_heads
        self.grad_checkpointing = False
        self.init_std = (0.4 / embed_dim) ** 0.5 if init_std is None else init_std
        if share_rotations in ("heads", "both"):
            rotary_options["shared_heads"] = True

        def rope() -> RotaryEmbedding | None:
            if position == "none":
                return None
            return RotaryEmbedding(
                position,
                num_heads=kv_heads,
                head_dim=embed_dim // num_heads,
                num_axes=1,
                block_size=block_size,
                init=init,
                base=base,
                **rotary_options,
            )

        self.embed = nn.Embedding(vocab_size, embed_dim)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                num_kv_heads=kv_heads,
                bias=False,
                norm=nn.RMSNorm,
                rope=rope(),
                rotate_values=rotate_values,
                mlp_ratio=mlp_ratio,
            )
            for _ in range(depth)
        )
        self.norm = nn.RMSNorm(embed_dim, eps=1e-6)
        self.head = None if tie_embeddings else nn.Linear(embed_dim, vocab_size, bias=False)
        self.reset_parameters()

    def arguments(self) -> dict[str, Any]:
        return dict(self._given)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and ".rope." not in name:
                last = name.endswith(("attn.proj.weight", "mlp.fc2.weight"))
                scale = (2 * len(self.blocks)) ** -0.5 if last else 1.0
                nn.init.normal_(parameter, std=self.init_std * scale)

    def new_cache(self, batch_size: int, max_length: int) -> Cache:
        attention = self.blocks[0].attn
        heads, dim = attention.num_kv_heads, attention.qkv.in_features // attention.num_heads
        shape = (len(self.blocks), batch_size, heads, max_length, dim)
        weight = self.embed.weight
        return Cache(weight.new_zeros(shape), weight.new_zeros(shape))

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Return the logits (B, T, V) of the token after each of tokens (B, T)."""
        past, length = 0 if cache is None else cache.length, tokens.shape[1]
        index = torch.arange(past, past + length, device=tokens.device)
        if positions is None:
            positions = index[:, None]
        scale = None
        if self.attention_temperature == "log":
            scale = ((index + 1).float().log() / math.log(self.context)).clamp_min(1)[:, None]
        if cache is None:
            angles: Any = self._angles()
        else:
            angles = cache.angles = cache.angles or self._angles()
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            attend = Causal(scale)
            if cache is not None:
                attend = Causal(scale, cache.keys[number], cache.values[number], past)
            run = functools.partial(block, attend=attend)
            if self.grad_checkpointing and self.training:
                x = checkpoint(run, x, positions, angles[number], use_reentrant=False)
            else:
                x = run(x, positions, angles[number])
        if cache is not None:
            cache.length += length
        x = self.norm(x)
        return nn.functional.linear(x, self.embed.weight) if self.head is None else self.head(x)

    def _angles(self) -> list[Angles] | list[None]:
        methods = [rope.method for rope in rotary_modules(self).values()]
        return batched_angles(methods) or [None] * len(self.blocks)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Return tokens (B, T + max_new_tokens)."""
        total = tokens.shape[1] + max_new_tokens
        cache = self.new_cache(tokens.shape[0], total) if use_cache else None
        new = tokens
        while tokens.shape[1] < total:
            logits = self(new if use_cache else tokens, cache=cache)[:, -1].float()
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    least = logits.topk(top_k).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -torch.inf)
                shares = (logits / temperature).softmax(-1)
                new = torch.multinomial(shares, 1, generator=generator)
            tokens = torch.cat((tokens, new), 1)
        return tokens

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Save only the inputs of blocks, and recompute the rest in the backward pass."""
        self.grad_checkpointing = enable

    def position_parameters(self) -> int:
        """Count the parameters of the position encoding."""
        return sum(p.numel() for rope in rotary_modules(self).values() for p in rope.parameters())


def create_gpt(name: str, **options: Any) -> GPT:
    """Create a GPT by name, one of ``SIZES``; ``options`` are those of ``GPT``."""
    return GPT(**{**SIZES[_checks.one_of("name", name, SIZES)], **options})
