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
from comrope.angles import CollinearAngles, CommutingAngles, GeneralAngles
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
    if isinstance(angles, CollinearAngles):
        size = angles.skew.shape[-1]
        angles = angles.as_commuting() if size == 2 else CommutingAngles(*angles.spectrum(), size)
    basis = angles.basis if isinstance(angles, CommutingAngles) else None
    order, heads = rope.channel_order, attention.num_heads
    rotated = 3 if attention.rotate_values else 2  # of q, k and v
    for parameter in attention.qkv.parameters():
        parts = parameter.unflatten(0, (3, heads, -1)).movedim(2, -1)  # (3, H, ..., D)
        parts = torch.cat((_folded(parts[:rotated], order, basis), parts[rotated:]))
        parameter.copy_(parts.movedim(-1, 2).flatten(0, 2))
    if attention.rotate_values:  # Q^T v went in, so Q is to come out
        weight = attention.proj.weight
        columns = weight.unflatten(1, (heads, -1)).movedim(0, 1)[None]  # (1, H, C, D)
        weight.copy_(_folded(columns, order, basis)[0].movedim(0, 1).flatten(1))
    prefix = rope.num_prefix_tokens
    if isinstance(angles, CommutingAngles):
        attention.add_module("rope", Planes(angles, prefix))
    else:
        attention.add_module("rope", Exponentials(angles, prefix))


def _folded(channels: Tensor, channel_order: str, basis: Tensor | None) -> Tensor:
    """Q^T of channels (parts, H, ..., D), with neighbours as planes."""
    if channel_order == "half":
        channels = halves_to_neighbours(channels)
    if basis is None:
        return channels
    blocks = channels.double().unflatten(-1, (-1, basis.shape[-1]))  # to be rounded once
    blocks = torch.einsum("ph...mi,hmij->ph...mj", blocks, basis.double())
    return blocks.flatten(-2).to(channels.dtype)


class Planes(nn.Module):
    """Vanilla RoPE with any frequencies (N, H, m, f), where a ``RotaryEmbedding`` was."""

    frequencies: Tensor

    def __init__(self, torus: CommutingAngles, num_prefix_tokens: int) -> None:
        super().__init__()
        self.block_size, self.num_prefix_tokens = torus.block_size, num_prefix_tokens
        self.register_buffer("frequencies", torus.frequencies.clone())

    def rotate_qkv(self, qkv: Tensor, positions: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As ``RotaryEmbedding.rotate_qkv``; ``angles`` and ``inplace`` have no effect."""
        return ops.rotate_qkv(qkv, positions, **self._options())

    def rotate(self, x: Tensor, positions: Tensor, *, inverse: bool = False, **_: Any) -> Tensor:
        return ops.rotate_single(x, positions, inverse=inverse, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "angles": CommutingAngles(None, self.frequencies, self.block_size),
            "key_heads": self.frequencies.shape[1],
            "backend": "spectral",
            "num_prefix_tokens": self.num_prefix_tokens,
        }


class Exponentials(nn.Module):
    """Angle matrices (N, H, m, b, b) that do not commute, where a ``RotaryEmbedding`` was.

    For positions in [0, 1], as those of patches are: further out it would lose digits.
    """

    skew: Tensor

    def __init__(self, free: GeneralAngles, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.register_buffer("skew", free.skew.clone())
        largest = float(torch.linalg.matrix_norm(free.skew, ord=2).sum(0).max())
        self.squarings = math.ceil(math.log2(max(largest, 1.0)))

    def rotate_qkv(self, qkv: Tensor, positions: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unpack(qkv, self.skew.shape[1])
        rotations = self._rotations(positions, q.shape[2])
        return _turned(q, rotations), _turned(k, rotations), v

    def rotate(self, x: Tensor, positions: Tensor, *, inverse: bool = False, **_: Any) -> Tensor:
        rotations = self._rotations(positions, x.shape[2])
        return _turned(x, rotations.mT if inverse else rotations)

    def _rotations(self, positions: Tensor, tokens: int) -> Tensor:
        """(T, H, m, b, b)."""
        x = at_every_token(positions, tokens, self.num_prefix_tokens).to(self.skew.dtype)
        exponents = sum_over_axes(x[..., None, None, None, None, :], self.skew)
        return exponential(exponents, self.squarings)


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
