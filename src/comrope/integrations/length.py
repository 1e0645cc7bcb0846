"""Rotations whose frequencies follow the length of the input, as ``rope_type`` "dynamic" and
"longrope" of transformers define them.

The stock module computes its frequencies in every forward pass, from the largest position. With r_k
for their ratio to the original ones, the learned angle matrix A becomes S A S with
S = diag(sqrt r): exactly the stock frequencies as long as A is that of vanilla RoPE, and
skew-symmetric, so a rotation, afterwards.

Keys in a cache keep the frequencies of their pass. Their basis differs from that of later queries,
so it does not cancel in the scores: rotated vectors are multiplied by it.

Shapes: H key heads, m blocks per head, b block size, P planes per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comrope.angles import CollinearAngles
from comrope.ops.folding import change_channels
from comrope.rotary import RotaryEmbedding

__all__ = ["check_length_independent", "follows_length", "frequency_ratio", "rotate_with_ratio"]

LENGTH_DEPENDENT = ("dynamic", "longrope")


def follows_length(stock: nn.Module) -> bool:
    """Return whether a stock module computes its frequencies from the length of each input."""
    return getattr(stock, "rope_type", "default") in LENGTH_DEPENDENT


def check_length_independent(model: nn.Module) -> None:
    """Raise if a rotation of a swapped model follows the length: it cannot be folded."""
    for module in model.modules():
        stock = getattr(module, "stock", None)
        if isinstance(stock, nn.Module) and follows_length(stock):
            raise ValueError(
                f"model: has frequencies that follow the length of the input (rope_type "
                f"{stock.rope_type!r}), so its basis changes with the length and cannot be folded "
                "into the projections; expected a model with constant frequencies"
            )


@torch.no_grad()
def frequency_ratio(stock: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Return the frequencies of this input over the original ones, (P,).

    The call of the stock module updates its state, which depends on earlier inputs too.
    """
    stock(x, position_ids)
    original = stock.original_inv_freq.to(device=x.device, dtype=torch.float32)
    return stock.inv_freq.to(device=x.device, dtype=torch.float32) / original


def rotate_with_ratio(
    rotation: RotaryEmbedding,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    ratio: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return R(x) q and R(x) k, with the basis, for angle matrices S A S.

    Args:
        rotation: On one axis, with blocks of even size.
        q, k: As in ``RotaryEmbedding.forward``.
        positions: (T, 1) or (B, T, 1).
        ratio: Of frequencies, (P,).
        options: Of ``RotaryEmbedding.forward``.
    """
    matrices = rotation.angles().matrices()[0]  # (H, m, b, b)
    root = ratio.to(matrices.dtype).sqrt().repeat_interleave(2).view(*matrices.shape[1:3])
    skew = root[..., :, None] * matrices * root[..., None, :]
    angles = CollinearAngles(skew, skew.new_ones(1, *skew.shape[:2])).cache_spectrum()
    q, k = rotation(q, k, positions, angles=angles, **options)
    if rotation.block_size == 2:  # every basis of a plane commutes with its rotation
        return q, k
    basis = angles.spectrum()[0].mT  # a constant, as in the rotation
    return (
        change_channels(q.to(basis.dtype), basis, rotation.channel_order).to(q.dtype),
        change_channels(k.to(basis.dtype), basis, rotation.channel_order).to(k.dtype),
    )
