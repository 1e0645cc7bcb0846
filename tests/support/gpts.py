"""Small GPTs in float64, and the slow implementation that they are compared with.

Shapes: B batch, T tokens, H heads, G queries per key head, D channels per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import comrope
from comrope.models import GPT

VOCABULARY, CONTEXT = 23, 12
VARIANTS = {  # options that change what is computed
    "plain": {},
    "values": {"rotate_values": True},
    "groups": {"num_kv_heads": 2, "rotate_values": True, "tie_embeddings": False},
    "layers": {"share_rotations": "layers", "num_kv_heads": 1},
    "halves": {"channel_order": "half", "num_kv_heads": 2, "rotate_values": True},
    "sharper": {"attention_temperature": "log", "rotate_values": True},
}
CASES = [
    (method, options) for method in comrope.METHODS for options in VARIANTS.values()
] + [
    ("none", options)
    for options in ({}, {"num_kv_heads": 2}, {"attention_temperature": "log"})
]  # fmt: skip


def nano(position: str = "comrope-ld", *, dtype: torch.dtype = torch.float64, **options) -> GPT:
    """A GPT whose weights are not those of any initialization."""
    sizes = {"vocab_size": VOCABULARY, "context": CONTEXT, "embed_dim": 32, "depth": 2}
    if position != "none":
        options = {"block_size": 4, "base": 20.0, **options}
    model = GPT(position=position, **{**sizes, "num_heads": 4, **options}).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for block in model.blocks:
            block.attn.qkv.weight.mul_(3)  # attention that is not nearly uniform
    return model


def text(batch: int = 3, length: int = 15) -> Tensor:
    """Random tokens (B, T), by default longer than the context, and more than channels."""
    return torch.randint(VOCABULARY, (batch, length))


def slow_logits(model: GPT, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """The logits with explicit rotation matrices, masks and sums, without any part of the model
    except its weights."""
    batch, length = tokens.shape
    if positions is None:
        positions = torch.arange(length, dtype=torch.float64)[:, None].expand(batch, -1, 1)
    hidden = torch.tensor([[j > i for j in range(length)] for i in range(length)])
    x = model.embed.weight[tokens]
    for block in model.blocks:
        layer = block.attn
        heads, dim = layer.num_heads, model.head_dim
        groups = heads // model.num_kv_heads
        qkv = _normed(x, block.norm1) @ layer.qkv.weight.mT
        parts = qkv.split([heads * dim, model.num_kv_heads * dim, model.num_kv_heads * dim], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))  # (B, H G, T, D)
        if layer.rope is None:
            relative = torch.eye(dim, dtype=x.dtype).expand(batch, heads, length, length, dim, dim)
        else:
            full = _full(layer.rope, positions).repeat_interleave(groups, dim=1)
            relative = full.mT[:, :, :, None] @ full[:, :, None]  # R(x_i)^T R(x_j)
        scores = torch.einsum("bhic,bhijcd,bhjd->bhij", q, relative, k) / dim**0.5
        if model.attention_temperature == "log":
            factors = [max(1.0, math.log(n + 1) / math.log(model.context)) for n in range(length)]
            scores = scores * torch.tensor(factors, dtype=torch.float64)[:, None]
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if layer.rotate_values:
            mixed = torch.einsum("bhij,bhijcd,bhjd->bhic", shares, relative, v)
        else:
            mixed = shares @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ layer.proj.weight.mT
        up = torch.nn.functional.gelu(_normed(x, block.norm2) @ block.mlp.fc1.weight.mT)
        x = x + up @ block.mlp.fc2.weight.mT
    last = model.embed.weight if model.head is None else model.head.weight
    return _normed(x, model.norm) @ last.mT


def _normed(x: Tensor, norm: torch.nn.RMSNorm) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight


def _full(rope: comrope.RotaryEmbedding, positions: Tensor) -> Tensor:
    """The rotation matrices (B, H, T, D, D) in the channel order of the layer."""
    blocks = rope.rotation_matrices(positions)  # (B, T, H, m, b, b)
    size = blocks.shape[-1]
    full = blocks.new_zeros(*blocks.shape[:3], rope.head_dim, rope.head_dim)
    for number in range(blocks.shape[3]):
        part = slice(number * size, (number + 1) * size)
        full[..., part, part] = blocks[:, :, :, number]
    if rope.channel_order == "half":
        order = torch.arange(rope.head_dim).view(-1, 2).mT.flatten()  # channel c here is order[c]
        full = full[..., order, :][..., order]
    return full.transpose(1, 2)
