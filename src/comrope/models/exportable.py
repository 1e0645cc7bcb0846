"""A ViT as exporters want it: images in, logits out, and every rotation a constant.

Angles are worked out once, eigendecompositions among them, and their bases go into the projections
of queries and keys (docs/theory.md): what is left is vanilla RoPE with frequencies of its own for
every head, at positions that follow the size of the image. LieRE has no basis to fold: its
exponentials stay, as plain products.

Shapes: B batch, T tokens, N axes, H heads, D head dimension, m blocks a head, b block size.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from comrope import ops
from comrope.angles import Free, Line, Torus
from comrope.models.attention import Attention
from comrope.models.vit import ViT
from comrope.ops.layout import at_every_token, halves_to_neighbours, to_blocks, unpack
from comrope.ops.spectral import sum_over_axes

__all__ = ["Exportable", "exponential"]

TERMS = 12  # of the exponential series: for matrices of norm 1, right to 1 / 13! = 2e-10


class Exportable(nn.Module):
    """Logits (B, num_classes) of a canvas (B, C, X_1, ..., X_N): a copy of a model, for inference.

    Hand it to ``torch.export`` or ``torch.onnx.export``, with any batch and any sizes dynamic. Its
    weights should be float32: in less, folded ones would be rounded once more.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.vit = copy.deepcopy(model).requires_grad_(False)
        for module in list(self.vit.modules()):
            if isinstance(module, Attention) and module.rope is not None:
                _simplify(module)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x)


@torch.no_grad()
def _simplify(attention: Attention) -> None:
    """Constants for angles, in place, with neighbouring channels as planes."""
    rope = attention.rope
    assert rope is not None
    angles = rope.angles()
    if isinstance(angles, Line):
        size = angles.skew.shape[-1]
        angles = angles.plane() if size == 2 else Torus(*angles.spectrum(), size)
    basis = angles.basis if isinstance(angles, Torus) else None
    for parameter in attention.qkv.parameters():
        parameter.copy_(_folded(parameter, attention.num_heads, rope.channel_order, basis))
    prefix = rope.num_prefix_tokens
    turn = Planes(angles, prefix) if isinstance(angles, Torus) else Exponentials(angles, prefix)
    attention.add_module("rope", turn)


def _folded(rows: Tensor, heads: int, channel_order: str, basis: Tensor | None) -> Tensor:
    """Rows (3 H D, ...) of a projection to q, k and v that gives Q^T q, Q^T k and v instead."""
    parts = rows.unflatten(0, (3, heads, -1))
    turned = parts[:2].movedim(2, -1)  # (2, H, ..., D)
    if channel_order == "half":
        turned = halves_to_neighbours(turned)
    if basis is not None:  # in float64, to be rounded once
        blocks = turned.double().unflatten(-1, (-1, basis.shape[-1]))
        blocks = torch.einsum("ph...mi,hmij->ph...mj", blocks, basis.double())
        turned = blocks.flatten(-2).to(rows.dtype)
    return torch.cat((turned.movedim(-1, 2), parts[2:])).flatten(0, 2)


class Planes(nn.Module):
    """Vanilla RoPE with any frequencies (N, H, m, f), where a ``RotaryEmbedding`` was."""

    frequencies: Tensor

    def __init__(self, torus: Torus, num_prefix_tokens: int) -> None:
        super().__init__()
        self.block_size, self.num_prefix_tokens = torus.block_size, num_prefix_tokens
        self.register_buffer("frequencies", torus.frequencies.clone())

    def packed(self, qkv: Tensor, positions: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As ``RotaryEmbedding.packed``, whose ``angles`` and ``in_place`` mean nothing here."""
        return ops.rotate_packed(
            qkv,
            positions,
            Torus(None, self.frequencies, self.block_size),
            key_heads=self.frequencies.shape[1],
            backend="spectral",
            num_prefix_tokens=self.num_prefix_tokens,
        )


class Exponentials(nn.Module):
    """Angle matrices (N, H, m, b, b) that do not commute, where a ``RotaryEmbedding`` was.

    For positions in [0, 1], as those of patches are: further out it would lose digits.
    """

    skew: Tensor

    def __init__(self, free: Free, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.register_buffer("skew", free.skew.clone())
        largest = float(torch.linalg.matrix_norm(free.skew, ord=2).sum(0).max())
        self.squarings = math.ceil(math.log2(max(largest, 1.0)))

    def packed(self, qkv: Tensor, positions: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unpack(qkv, self.skew.shape[1])
        x = at_every_token(positions, q.shape[2], self.num_prefix_tokens).to(self.skew.dtype)
        exponents = sum_over_axes(x[..., None, None, None, None, :], self.skew)
        rotations = exponential(exponents, self.squarings)  # (T, H, m, b, b)
        return _turned(q, rotations), _turned(k, rotations), v


def _turned(x: Tensor, rotations: Tensor) -> Tensor:
    blocks = to_blocks(x, rotations.shape[1], rotations.shape[-1]).to(rotations.dtype)
    turned = torch.einsum("thmij,bhgtmj->bhgtmi", rotations, blocks)
    return turned.reshape(x.shape).to(x.dtype)


def exponential(matrices: Tensor, squarings: int) -> Tensor:
    """exp of matrices (..., b, b) of norm 2 ** squarings or less, by scaling and squaring."""
    scaled = matrices * 2.0**-squarings
    eye = torch.eye(matrices.shape[-1], device=matrices.device, dtype=matrices.dtype)
    result = eye + scaled / TERMS
    for term in range(TERMS - 1, 0, -1):
        result = eye + scaled @ result / term
    for _ in range(squarings):
        result = result @ result
    return result
