"""A GPT with one position encoding: a causal language model on the rotary layer.

Shapes: B batch, T tokens, C channels, D channels per head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comrope import _checks
from comrope._dtypes import compute_dtype
from comrope.methods import METHODS, method_class
from comrope.models.attention import Block, log_temperature
from comrope.models.causal import Cache, CausalAttention
from comrope.models.generation import CausalModel, check_tokens
from comrope.models.transformer import check_divisor, check_rotation
from comrope.rotary import RotaryEmbedding

__all__ = ["GPT", "SIZES", "create_gpt"]

POSITIONS = (*METHODS, "none")
SHARED = ("none", "heads", "layers", "both")
WITH_HEADS = {"none": "heads", "layers": "both"}
TEMPERATURES = ("constant", "log")
SIZES: dict[str, dict[str, int]] = {  # "nano" and "micro" are for a CPU
    "gpt_nano": {"depth": 4, "embed_dim": 128, "num_heads": 4},
    "gpt_micro": {"depth": 6, "embed_dim": 256, "num_heads": 4},
    "gpt_tiny": {"depth": 6, "embed_dim": 384, "num_heads": 6},
    "gpt_small": {"depth": 12, "embed_dim": 768, "num_heads": 12},
    "gpt_medium": {"depth": 24, "embed_dim": 1024, "num_heads": 16},
    "gpt_1b": {"depth": 18, "embed_dim": 2048, "num_heads": 16},  # with 50,000 tokens
}


class GPT(CausalModel):
    """A plain pre-norm GPT: RMSNorm, no biases, an MLP with GELU, rotations as its only positions.

    The position of a token is its index, on one axis, not scaled.

    Args:
        vocab_size: V.
        context: Tokens of a sequence at training. The model runs at any other length too.
        embed_dim, depth, num_heads, mlp_ratio: As in timm.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads`` and by default the same
            (grouped queries). Every one of them has rotations of its own.
        tie_embeddings: Use the embedding of the tokens as the weight of the last projection too.
        position: A method of ``comrope.METHODS`` or ``"none"``.
        rotate_values: Rotate values too, and the outputs of attention back. Outputs then depend on
            the positions of values relative to the query.
        share_rotations: Which parts of the model share their learned rotations: ``"none"``,
            ``"heads"``, ``"layers"`` or ``"both"``. ``shared_heads=True``, the option of
            ``RotaryEmbedding``, adds the heads to it.
        attention_temperature: ``"constant"``, or ``"log"``: beyond ``context``, queries grow with
            the logarithm of the number of visible tokens (see ``log_temperature``).
        block_size, init: As in ``RotaryEmbedding``; ``init`` is a name, so that it can be saved.
        base: Vanilla RoPE's base, 10000 by default.
        init_std: Standard deviation of initial weights, by default sqrt(2 / (5 C)) (Nguyen and
            Salazar, arXiv 1910.05895), which is GPT-2's 0.02 for C = 1000. In the projections that
            end in the residual stream it is divided by sqrt(2 depth), as in GPT-2.
        rotary_options: Other options of ``RotaryEmbedding`` (see ``ROTARY_OPTIONS``).

    A folder of ``save_pretrained`` contains no tokenizer.
    """

    input_name = "tokens"

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
        given = locals()
        super().__init__()
        _checks.one_of("position", position, POSITIONS)
        _checks.one_of("share_rotations", share_rotations, SHARED)
        if _checks.boolean("shared_heads", rotary_options.pop("shared_heads", False)):
            share_rotations = WITH_HEADS.get(share_rotations, share_rotations)
        self.note_arguments({**given, "share_rotations": share_rotations}, rotary_options)
        check_rotation(
            position,
            init=init,
            default_init="rope",
            base=base,
            rotary_options=rotary_options,
            rotate_values=(rotate_values, False),
            share_rotations=(share_rotations, "none"),
        )
        if "num_axes" in rotary_options:
            raise TypeError("num_axes: expected none, since the tokens of a GPT have one axis")
        self.vocab_size = _checks.integer("vocab_size", vocab_size, 1)
        self.context = _checks.integer("context", context, 2)
        self.position = position
        self.attention_temperature = _checks.one_of(
            "attention_temperature", attention_temperature, TEMPERATURES
        )
        check_divisor("num_heads", num_heads, embed_dim=_checks.integer("embed_dim", embed_dim, 1))
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divisor("num_kv_heads", self.num_kv_heads, num_heads=num_heads)
        self.head_dim = embed_dim // num_heads
        std = (0.4 / embed_dim) ** 0.5 if init_std is None else init_std
        self.init_std = _checks.real("init_std", std)
        if share_rotations in ("heads", "both"):
            if not method_class(position).learns:
                raise ValueError(
                    f"share_rotations: expected 'none' or 'layers', since position {position!r} "
                    f"has no parameters to share, got {share_rotations!r}"
                )
            rotary_options["shared_heads"] = True

        def rope() -> RotaryEmbedding | None:
            if position not in METHODS:
                return None
            return RotaryEmbedding(
                position,
                num_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                num_axes=1,
                block_size=block_size,
                init=init,
                base=base,
                position_scale=None,
                num_prefix_tokens=0,
                **rotary_options,
            )

        self.embed = nn.Embedding(vocab_size, embed_dim)
        self.rope = rope() if share_rotations in ("layers", "both") else None
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                num_kv_heads=self.num_kv_heads,
                bias=False,
                norm=nn.RMSNorm,
                rope=rope() if self.rope is None else self.rope,
                owns_rope=self.rope is None,
                rotate_values=rotate_values,
                mlp_ratio=mlp_ratio,
            )
            for _ in range(_checks.integer("depth", depth, 1))
        )
        self.norm = nn.RMSNorm(embed_dim, eps=1e-6)
        self.head = None if tie_embeddings else nn.Linear(embed_dim, vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters anew, also after construction on the meta device."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attn.proj", "mlp.fc2"))
                share = (2 * len(self.blocks)) ** -0.5 if ends_branch else 1.0
                module.weight.normal_(std=self.init_std * share)
            elif isinstance(module, nn.RMSNorm | RotaryEmbedding):
                module.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Return the logits of the token that follows each token.

        Args:
            tokens: (B, T), int64. A range check is made on the CPU only; on a GPU it would
                synchronize.
            positions: (T, 1) or (B, T, 1), by default the indices of the tokens: 0, 1, ..., with a
                cache from its length on.
            cache: The tokens follow those in it, and are added to it. No gradient is computed.
            last_only: Return logits for the last token only.

        Returns:
            (B, T, V), or (B, 1, V).

        Raises:
            TypeError: ``tokens`` is no tensor, or of another dtype.
            ValueError: A token is out of range, or the cache is too short or not of this model and
                batch size; the cache is unchanged.
        """
        check_tokens(tokens, self.vocab_size)
        if cache is None:
            return self._logits(tokens, positions, None, last_only)
        cache.check(len(self.blocks), (tokens.shape[0], self.num_kv_heads, self.head_dim))
        cache.require_room(tokens.shape[1])
        with torch.no_grad():
            logits = self._logits(tokens, positions, cache, last_only)
        cache.length += tokens.shape[1]
        return logits

    def _logits(
        self, tokens: Tensor, positions: Tensor | None, cache: Cache | None, last_only: bool
    ) -> Tensor:
        start, angles = 0, None
        layers: Sequence[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self.blocks)
        if cache is not None:
            start, layers = cache.length, cache.layers
            angles = cache.angles if start else None
        end = start + tokens.shape[1]
        index = torch.arange(start, end, device=tokens.device)
        positions = index[:, None] if positions is None else positions
        if angles is None:
            angles = self._angles(positions)
        if cache is not None:
            cache.angles = angles
        x = self.embed(tokens)
        temperature = self._temperature(index + 1, end, x)
        attend = [CausalAttention(temperature, *layer, start) for layer in layers]
        x = self.apply_blocks(x, positions, angles, attend)
        x = self.norm(x[:, -1:] if last_only else x)
        return nn.functional.linear(x, self.embed.weight) if self.head is None else self.head(x)

    def _temperature(self, visible: Tensor, most: int, x: Tensor) -> Tensor | None:
        """Return the factors (T, 1) of queries, or None if all are one."""
        if self.attention_temperature == "constant":
            return None
        # A graph must not depend on the length.
        if not torch.compiler.is_compiling() and most <= self.context:
            return None
        return log_temperature(visible, self.context, compute_dtype(x))[:, None]

    def new_cache(self, batch_size: int, max_length: int) -> Cache:
        """Return an empty cache for so many sequences of up to so many tokens.

        It is for this model, as long as its weights and rotations do not change. Under autocast it
        has the dtype of autocast, otherwise that of the weights.
        """
        _checks.integer("batch_size", batch_size, 1)
        _checks.integer("max_length", max_length, 1)
        weight = self.embed.weight
        device, dtype = weight.device, weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        shape = (batch_size, self.num_kv_heads, max_length, self.head_dim)
        return Cache(len(self.blocks), shape, device=device, dtype=dtype)

    def example_input(
        self, batch: int, more: int = 0, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return random tokens (B, context + more)."""
        return torch.randint(self.vocab_size, (batch, self.context + more), generator=generator)

    def dynamic_sizes(self) -> dict[int, tuple[str, int]]:
        return {1: ("tokens", 1)}

    def extra_repr(self) -> str:
        return f"context={self.context}, attention_temperature={self.attention_temperature!r}"


def create_gpt(name: str, **options: Any) -> GPT:
    """Create a GPT by name.

    Args:
        name: One of ``SIZES``, such as ``gpt_small``.
        options: Options of ``GPT``, which override the name; ``vocab_size`` is required.
    """
    return GPT(**{**SIZES[_checks.one_of("name", name, SIZES)], **options})
