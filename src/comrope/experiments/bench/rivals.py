"""Rotations of other libraries: timm, Hugging Face, rotary-embedding-torch, x-transformers.

Every rival computes its rotation with the code of its library. It also has a definition, from
phases and the pairs of channels that form planes; the parity check compares both in float64. Tables
that a network computes once for all layers are computed before the timing starts.

Shapes: B batch, H heads, T tokens, D head dimension; rotations take q and k (B, H, T, D).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comrope._dtypes import compute_dtype, no_autocast
from comrope.experiments.bench.cases import Shape
from comrope.models.attention import Attend, Attention, attend_to_all
from comrope.rotary import RotaryEmbedding

__all__ = [
    "PLAIN",
    "RIVALS",
    "TIMM_AXIAL",
    "TIMM_MIXED",
    "CopyOfInputs",
    "HuggingFaceRoPE",
    "PlainRoPE",
    "Rival",
    "RivalAttention",
    "RotaryEmbeddingTorch",
    "TimmAxial",
    "TimmMixed",
    "XTransformers",
]


class Rival(nn.Module):
    """A rotation of q and k at fixed positions."""

    by_halves = True  # planes of channels c and c + D / 2, otherwise 2c and 2c + 1
    rope: Any  # the library's module, if it has one
    prefix = 0  # unrotated leading tokens
    use_definition = False  # compute the definition instead, for the parity check

    def phases(self, dtype: torch.dtype) -> Tensor:
        """Return the phases (T, D / 2) or (H, T, D / 2), without prefix tokens."""
        raise NotImplementedError

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate with the library's own code."""
        raise NotImplementedError

    def define(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate by the definition, in float32 or wider."""
        phases = self.phases(compute_dtype(q, k))
        angles = nn.functional.pad(phases, (0, 0, self.prefix, 0))
        return _rotated(q, angles, self.by_halves), _rotated(k, angles, self.by_halves)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.define(q, k) if self.use_definition else self.rotate(q, k)


class PlainRoPE(Rival):
    """Vanilla RoPE in plain PyTorch, from tables of cosines and sines.

    There are tables in float32 and in the timed dtype. The one of q's dtype is used, because
    products with float32 tables would be in float32, and slow.
    """

    cos: Tensor
    sin: Tensor
    narrow_cos: Tensor
    narrow_sin: Tensor

    def __init__(self, phases: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.exact_phases = phases.double()
        angles = torch.cat((phases, phases), dim=-1)
        self._keep(angles.cos().float(), angles.sin().float(), dtype)

    @classmethod
    def of(cls, shape: Shape) -> PlainRoPE:
        """Create one with the angles of ``RotaryEmbedding("rope")``."""
        return cls(_vanilla_phases(shape), shape.dtype)

    def phases(self, dtype: torch.dtype) -> Tensor:
        return self.exact_phases.to(dtype)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        narrow = q.dtype == self.narrow_cos.dtype
        cos, sin = (self.narrow_cos, self.narrow_sin) if narrow else (self.cos, self.sin)
        return self._apply_tables(q, k, cos, sin)

    def _apply_tables(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin

    def _keep(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> None:
        for name, table in (("cos", cos), ("sin", sin)):
            self.register_buffer(name, table, persistent=False)
            self.register_buffer(f"narrow_{name}", table.to(dtype), persistent=False)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> PlainRoPE:
        return self  # device and dtypes are final; .float() would convert the narrow tables


class HuggingFaceRoPE(PlainRoPE):
    """transformers' Llama: tables of ``LlamaRotaryEmbedding``, used by its own function."""

    def __init__(self, shape: Shape) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama

        nn.Module.__init__(self)
        config = LlamaConfig(
            hidden_size=shape.heads * shape.head_dim,
            num_attention_heads=shape.heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.tokens,
        )
        rope = modeling_llama.LlamaRotaryEmbedding(config).to(shape.device)
        places = torch.arange(shape.tokens, device=shape.device)
        cos, sin = rope(torch.empty(0, device=shape.device), places[None])
        self.exact_phases = places[:, None].double() * rope.inv_freq.double()
        self.apply_tables = modeling_llama.apply_rotary_pos_emb
        self._keep(cos, sin, shape.dtype)

    def _apply_tables(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.apply_tables(q, k, cos, sin)


class RotaryEmbeddingTorch(Rival):
    """rotary-embedding-torch on a sequence, with cached frequencies."""

    by_halves = False

    def __init__(self, shape: Shape) -> None:
        library = importlib.import_module("rotary_embedding_torch")
        super().__init__()
        self.rope = library.RotaryEmbedding(shape.head_dim, cache_max_seq_len=shape.tokens).to(
            shape.device
        )
        places = torch.arange(shape.tokens, device=shape.device)
        # Fill the cache in float32: in bfloat16, integers above 256 have steps of two.
        self.rope(places.float(), seq_len=shape.tokens)
        self.places = places

    def phases(self, dtype: torch.dtype) -> Tensor:
        return self.places[:, None].to(dtype) * self.rope.freqs.detach().to(dtype)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.rope.rotate_queries_or_keys(q), self.rope.rotate_queries_or_keys(k)


class XTransformers(Rival):
    """x-transformers on a sequence, with frequencies that are computed once for all layers."""

    by_halves = False

    def __init__(self, shape: Shape) -> None:
        library = importlib.import_module("x_transformers.x_transformers")
        super().__init__()
        self.rope = library.RotaryEmbedding(shape.head_dim).to(shape.device)
        self.places = torch.arange(shape.tokens, device=shape.device)
        self.table, _ = self.rope(self.places)
        self.apply_table = library.apply_rotary_pos_emb

    def phases(self, dtype: torch.dtype) -> Tensor:
        return self.places[:, None].to(dtype) * self.rope.inv_freq.to(dtype)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.apply_table(q, self.table), self.apply_table(k, self.table)


class CopyOfInputs(Rival):
    """No rotation: copy q and k, and their gradients in the backward pass."""

    one: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.sizes = shape.tokens, shape.head_dim // 2
        # Multiplied by a tensor: compilers omit a product with the number 1.
        self.register_buffer("one", torch.ones((), device=shape.device), persistent=False)

    def phases(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.sizes, dtype=dtype, device=self.one.device)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * self.one, k * self.one


class _Timm(Rival):
    """The rotation of timm's ``AttentionRope``, without class tokens."""

    by_halves = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.prefix = shape.prefix
        rows, columns = (torch.arange(n, device=shape.device) for n in shape.grid)
        self.x, self.y = columns.repeat(len(rows)), rows.repeat_interleave(len(columns))

    def embedding(self) -> Tensor:
        """Return the sines and cosines that timm passes to its attention."""
        raise NotImplementedError

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        with no_autocast(q.device):  # autocast would round the angles to bfloat16
            embedding = self.embedding()
        return self._rotate_single(q, embedding), self._rotate_single(k, embedding)

    def _rotate_single(self, x: Tensor, embedding: Tensor) -> Tensor:
        from timm.layers import apply_rot_embed_cat

        if not self.prefix:
            return apply_rot_embed_cat(x, embedding).type_as(x)
        before, after = x[:, :, : self.prefix], x[:, :, self.prefix :]
        return torch.cat((before, apply_rot_embed_cat(after, embedding)), dim=2).type_as(x)


class TimmAxial(_Timm):
    """As in ``vit_*_patch16_rope_*``: fixed frequencies, half of the channels for each axis."""

    TEMPERATURE = 100.0

    def __init__(self, shape: Shape) -> None:
        from timm.layers import RotaryEmbeddingCat

        super().__init__(shape)
        self.rope = RotaryEmbeddingCat(
            shape.head_dim,
            in_pixels=False,
            temperature=self.TEMPERATURE,
            feat_shape=list(shape.grid),
            grid_indexing="xy",
            device=shape.device,
        )
        self.bands = shape.head_dim // 4

    def phases(self, dtype: torch.dtype) -> Tensor:
        powers = torch.arange(self.bands, device=self.x.device).to(dtype) / self.bands
        frequencies = self.TEMPERATURE**-powers
        return torch.cat([place[:, None].to(dtype) * frequencies for place in (self.x, self.y)], -1)

    def embedding(self) -> Tensor:
        return self.rope.get_embed()


class TimmMixed(_Timm):
    """As in ``vit_*_patch16_rope_mixed_*``: learned frequencies, with new tables at every step."""

    def __init__(self, shape: Shape) -> None:
        from timm.layers import RotaryEmbeddingMixed

        super().__init__(shape)
        self.rope = RotaryEmbeddingMixed(
            shape.heads * shape.head_dim,
            depth=1,
            num_heads=shape.heads,
            feat_shape=list(shape.grid),
            grid_indexing="xy",
            device=shape.device,
        )

    def phases(self, dtype: torch.dtype) -> Tensor:
        of_x, of_y = self.rope.freqs[:, 0, :, None].to(dtype)  # (H, 1, D / 2) each
        return self.x[:, None].to(dtype) * of_x + self.y[:, None].to(dtype) * of_y

    def embedding(self) -> Tensor:
        return self.rope.get_embed()[0]


class RivalAttention(nn.Module):
    """The attention layer of comrope's ViT, with the rotation of a rival."""

    def __init__(self, attention: Attention, rival: Rival) -> None:
        super().__init__()
        self.num_heads = attention.num_heads
        self.qkv, self.proj, self.rival = attention.qkv, attention.proj, rival

    def forward(
        self, x: Tensor, positions: Tensor, angles: Any = None, *, attend: Attend = attend_to_all
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3 * self.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.chunk(3, dim=2))
        q, k = self.rival(q, k)
        return self.proj(attend(q, k, v).transpose(1, 2).flatten(2))


PLAIN = "vanilla RoPE, plain PyTorch"
TIMM_AXIAL, TIMM_MIXED = "timm axial RoPE", "timm RoPE-Mixed"
RIVALS: dict[str, Callable[[Shape], Rival]] = {
    PLAIN: PlainRoPE.of,
    TIMM_AXIAL: TimmAxial,
    TIMM_MIXED: TimmMixed,
    "Hugging Face RoPE (1-D)": HuggingFaceRoPE,
    "rotary-embedding-torch (1-D)": RotaryEmbeddingTorch,
    "x-transformers (1-D)": XTransformers,
}


def _vanilla_phases(shape: Shape) -> Tensor:
    """Return the phases (T, D / 2) of ``RotaryEmbedding("rope")`` in patch units."""
    from comrope.positions import grid, with_class_token

    if not shape.grid:
        places = torch.arange(shape.tokens, dtype=torch.float64)[:, None]
    else:
        patches = grid(shape.grid, scale=shape.grid, dtype=torch.float64)
        middle = [size / 2 for size in shape.grid]
        places = with_class_token(patches, center=middle, count=shape.prefix)
    rope = RotaryEmbedding(
        "rope", num_heads=1, head_dim=shape.head_dim, num_axes=places.shape[-1], block_size=2
    )
    frequencies = rope.spectrum()[1].double().flatten(1)  # (N, D / 2)
    return (places @ frequencies).to(shape.device)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotated(x: Tensor, angles: Tensor, by_halves: bool) -> Tensor:
    """Rotate each plane of x (B, H, T, D) in the dtype of the angles; return the dtype of x."""
    wide = x.to(angles.dtype)
    first, second = wide.chunk(2, dim=-1) if by_halves else (wide[..., ::2], wide[..., 1::2])
    cos, sin = angles.cos(), angles.sin()
    first, second = first * cos - second * sin, first * sin + second * cos
    if by_halves:
        return torch.cat((first, second), dim=-1).to(x.dtype)
    return torch.stack((first, second), dim=-1).flatten(-2).to(x.dtype)
