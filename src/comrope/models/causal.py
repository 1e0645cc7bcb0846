"""Causal attention, with or without a cache of rotated keys.

Shapes: B batch, T tokens, H key heads, G queries per key head, D channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from comrope.angles import Angles

__all__ = ["Cache", "CausalAttention"]


class Cache:
    """The rotated keys and the values of the tokens so far, in every layer.

    A key is rotated once, when its token is added, and so is a value if values are rotated.

    Args:
        layers: Their number.
        shape: (B, H, max_length, D) of the keys of a layer, and of its values.
        device: Device of the tensors.
        dtype: Of the tensors.

    Attributes:
        length: Tokens so far. Set a smaller number to remove the last tokens.
        max_length: Tokens that it has memory for.
        angles: Of every block. Rotated keys contain a change of basis, which cancels in the scores
            of queries with the same angles only. So the cache keeps the angles of its first keys.
    """

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int, int, int],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layers = [
            (
                torch.empty(shape, device=device, dtype=dtype),
                torch.empty(shape, device=device, dtype=dtype),
            )
            for _ in range(layers)
        ]
        self.length, self.max_length = 0, shape[2]
        self.angles: Sequence[Angles | None] | None = None

    def check(self, layers: int, shape: tuple[int, int, int]) -> None:
        """Raise unless this cache is of such a model and batch.

        Args:
            layers: Of the model.
            shape: (B, H, D).
        """
        batch, heads, length, dim = self.layers[0][0].shape
        if (len(self.layers), heads, dim) != (layers, *shape[1:]):
            raise ValueError(
                f"cache: expected one of this model, with {layers} layers of {shape[1]} x "
                f"{shape[2]} channels, got {len(self.layers)} of {heads} x {dim}"
            )
        if batch != shape[0]:
            raise ValueError(f"cache: expected the batch size of tokens, {shape[0]}, got {batch}")
        if not 0 <= self.length <= length:
            raise ValueError(f"cache.length: expected 0 to {length}, got {self.length}")

    def require_room(self, tokens: int) -> None:
        """Raise unless so many tokens can be added."""
        needed = self.length + tokens
        if needed > self.max_length:
            raise ValueError(
                f"cache: expected max_length of at least {needed}, for {tokens} tokens after "
                f"{self.length}, got {self.max_length}"
            )


@dataclass(frozen=True)
class CausalAttention:
    """Attend from every token to itself and to those before it: an ``attend`` of ``Attention``."""

    temperature: Tensor | None = None  # factors of the queries, (T, 1)
    keys: Tensor | None = None  # of the cache, (B, H, max_length, D)
    values: Tensor | None = None
    start: int = 0  # tokens in the cache before those of the call
    scores_only: ClassVar[bool] = True  # see ``attention.uses_scores_only``

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs for q (B, H G, T, D); add k and v (B, H, T, D) to the cache."""
        if self.temperature is not None:
            q = (q * self.temperature).to(q.dtype)
        tokens, mask, causal = q.shape[2], None, True
        if self.keys is not None and self.values is not None:
            if k.dtype != self.keys.dtype:
                raise ValueError(
                    f"cache: expected the dtype of keys, {k.dtype}, got {self.keys.dtype}; create "
                    "it under the same autocast, for weights of the same dtype"
                )
            end = self.start + tokens
            self.keys[:, :, self.start : end] = k
            self.values[:, :, self.start : end] = v
            k, v = self.keys[:, :, :end], self.values[:, :, :end]
            if self.start:  # then "causal" of torch would hide the last keys
                causal = False
                if tokens > 1:
                    mask = torch.ones(tokens, end, dtype=torch.bool, device=q.device)
                    mask = mask.tril(self.start)
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
