"""A model with constant rotations, which ``torch.export`` and ONNX can express.

Angles are computed once, eigendecompositions included, and their bases are folded into the
projections, as in ``comrope.fold``. What remains is vanilla RoPE with frequencies per head, at
positions that depend on the size of the input. LieRE has no common basis; its matrix exponentials
become plain products.

Shapes: B batch, T tokens, N axes, H heads, D channels per head, m blocks per head, b block size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comrope.angles import Angles, GeneralAngles
from comrope.methods.rope_mixed import RoPEMixed
from comrope.models.attention import Attention
from comrope.models.transformer import RotaryTransformer
from comrope.ops.layout import (
    at_every_token,
    halves_to_neighbours,
    neighbours_to_halves,
    to_blocks,
    unpack,
)
from comrope.ops.spectral import sum_over_axes

__all__ = ["Exportable", "MatrixExponential", "exponential"]

TERMS = 12  # of the exponential series: for matrices of norm 1, the error is 1 / 13! = 2e-10


class Exportable(nn.Module):
    """Compute the logits of a copy of a model: a ViT from images, a GPT from tokens.

    For inference, with ``torch.export`` or ``torch.onnx.export``; batch and sizes can be dynamic.
    Weights should be float32: narrower ones are rounded once more when bases are folded in.
    """

    @torch.no_grad()
    def __init__(self, model: RotaryTransformer) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        layers = [
            (module, module.rope.angles())  # before any change: layers may share a rotation
            for module in self.model.modules()
            if isinstance(module, Attention) and module.rope is not None
        ]
        for layer, angles in layers:
            _fold_attention(layer, angles, model.axis_scale)
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@torch.no_grad()
def _fold_attention(attention: Attention, angles: Angles, reach: Sequence[float] | None) -> None:
    """Replace the rotation of a layer by a constant one, in place.

    ``reach`` is the largest coordinate of each axis, by default 1.
    """
    rope = attention.rope
    assert rope is not None
    if isinstance(angles, GeneralAngles):
        constant = MatrixExponential(angles, rope.channel_order, rope.num_prefix_tokens, reach)
        attention.__dict__.pop("rope", None)  # one that layers shared
        attention.add_module("rope", constant)
        return
    basis, frequencies = angles.spectrum()
    for name, value in attention.folded_projections(basis, exact=True).items():
        attention.get_parameter(name).copy_(value)
    rope.method, rope.backend = RoPEMixed.like(rope.method, frequencies), "spectral"


class MatrixExponential(nn.Module):
    """Rotate by exponentials of constant matrices (N, H, m, b, b) that do not commute.

    Replaces a ``RotaryEmbedding`` and has its methods; ``angles`` and ``inplace`` have no effect.
    Coordinates should be in [0, ``reach``], by default [0, 1], as those of patches are: outside,
    precision decreases.
    """

    skew: Tensor

    def __init__(
        self,
        angles: GeneralAngles,
        channel_order: str,
        num_prefix_tokens: int,
        reach: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.channel_order, self.num_prefix_tokens = channel_order, num_prefix_tokens
        self.register_buffer("skew", angles.skew.clone())
        norms = torch.linalg.matrix_norm(angles.skew, ord=2)
        if reach is not None:
            norms = norms * norms.new_tensor(reach)[:, None, None]
        largest = float(norms.sum(0).max())
        self.squarings = math.ceil(math.log2(max(largest, 1.0)))

    def rotate_qkv(self, qkv: Tensor, positions: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unpack(qkv, self.skew.shape[1])
        rotations = self._rotations(positions, q.shape[2])
        return self._apply_matrices(q, rotations), self._apply_matrices(k, rotations), v

    def rotate(self, x: Tensor, positions: Tensor, *, inverse: bool = False, **_: Any) -> Tensor:
        rotations = self._rotations(positions, x.shape[2])
        return self._apply_matrices(x, rotations.mT if inverse else rotations)

    def _rotations(self, positions: Tensor, tokens: int) -> Tensor:
        """Return R(x) of every token, (T, H, m, b, b)."""
        x = at_every_token(positions, tokens, self.num_prefix_tokens).to(self.skew.dtype)
        exponents = sum_over_axes(x[..., None, None, None, None, :], self.skew)
        return exponential(exponents, self.squarings)

    def _apply_matrices(self, x: Tensor, rotations: Tensor) -> Tensor:
        halves = self.channel_order == "half"
        x = halves_to_neighbours(x) if halves else x
        blocks = to_blocks(x, rotations.shape[1], rotations.shape[-1]).to(rotations.dtype)
        rotated = torch.einsum("thmij,bhgtmj->bhgtmi", rotations, blocks)
        rotated = rotated.reshape(x.shape).to(x.dtype)
        return neighbours_to_halves(rotated) if halves else rotated


def exponential(matrices: Tensor, squarings: int) -> Tensor:
    """Return exp of matrices (..., b, b) of norm at most 2 ** squarings, by scaling and squaring.

    A series of plain products: exporters have no ``matrix_exp``.
    """
    scaled = matrices * 2.0**-squarings
    eye = torch.eye(matrices.shape[-1], device=matrices.device, dtype=matrices.dtype)
    result = eye + scaled / TERMS
    for term in range(TERMS - 1, 0, -1):
        result = eye + scaled @ result / term
    for _ in range(squarings):
        result = result @ result
    return result
