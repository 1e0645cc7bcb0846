"""What a rotation is given, looked at before anything is done with it: vectors, and their places.

Every function here raises an error that names the argument, or returns nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope.methods import Method
from comrope.positions import check_positions

__all__ = [
    "check_axes",
    "check_one_and_places",
    "check_pair",
    "check_places",
    "check_projection",
    "check_vectors",
    "check_vectors_and_places",
]


def check_vectors_and_places(
    method: Method, q: Tensor, k: Tensor, positions: Tensor, prefix: int
) -> None:
    """Of queries (B, H G, T, D) and keys (B, H, T, D)."""
    check_tensor(method, "q", q)
    check_tensor(method, "k", k)
    check_pair(method, q.shape, k.shape)
    check_places(method, q.shape, positions, prefix)


def check_one_and_places(method: Method, x: Tensor, positions: Tensor, prefix: int) -> None:
    """Of queries, keys or values alone (B, H G, T, D)."""
    check_tensor(method, "x", x)
    if x.shape[1] == 0 or x.shape[1] % method.num_heads:
        raise ValueError(f"x: expected a multiple of {method.num_heads} heads, got {x.shape[1]}")
    check_places(method, x.shape, positions, prefix)


def check_projection(weight: Tensor, x: Tensor) -> None:
    """Of the heads of x (B, H G, T, D), side by side."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: expected a tensor, got {type(weight).__name__}")
    wide = x.shape[1] * x.shape[3]
    if weight.ndim != 2 or weight.shape[1] != wide or not weight.is_floating_point():
        raise ValueError(
            f"weight: expected floating numbers (C, {wide}), for {x.shape[1]} heads of "
            f"{x.shape[3]}, got {tuple(weight.shape)} of {weight.dtype}"
        )


def check_tensor(method: Method, label: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{label}: expected a tensor, got {type(x).__name__}")
    if x.ndim != 4:
        raise ValueError(f"{label}: expected shape (B, H, T, D), got {tuple(x.shape)}")
    check_vectors(method, label, x.shape, x.dtype)


def check_vectors(method: Method, label: str, shape: torch.Size, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"{label}: expected a floating dtype, got {dtype}")
    if shape[-1] != method.head_dim:
        raise ValueError(f"{label}: expected head_dim {method.head_dim}, got {shape[-1]}")


def check_pair(method: Method, q: torch.Size, k: torch.Size) -> None:
    heads = method.num_heads
    if k[1] != heads:
        raise ValueError(
            f"k: expected num_heads {heads} heads (those of the keys) in shape (B, H, T, D), "
            f"got {k[1]}"
        )
    if q[1] == 0 or q[1] % heads:
        raise ValueError(f"q: expected a multiple of {heads} heads, got {q[1]}")
    if q[0] != k[0] or q[2] != k[2]:
        raise ValueError(f"k: expected the batch and length of q {tuple(q)}, got {tuple(k)}")


def check_places(method: Method, q: torch.Size, positions: Tensor, prefix: int) -> None:
    """Of the tokens of q (B, H, T, D)."""
    tokens = q[2]
    if not isinstance(prefix, int) or not 0 <= prefix <= tokens:
        raise ValueError(
            f"num_prefix_tokens: expected 0 to {tokens}, the tokens of q, got {prefix}"
        )
    check_positions("positions", positions)
    check_axes(method, positions)
    rows = positions.shape[-2]
    if rows != tokens and rows != tokens - prefix:
        wanted = f"{tokens} rows, one a token" if not prefix else f"{tokens - prefix} rows"
        after = f" after {prefix} prefix tokens" if prefix else ""
        hint = " (class token? see with_class_token, num_prefix_tokens)" if rows < tokens else ""
        raise ValueError(f"positions: expected {wanted}{after}, got {rows}{hint}")
    if positions.ndim == 3 and positions.shape[0] not in (1, q[0]):
        raise ValueError(
            f"positions: expected the batch size of q, {q[0]}, got {positions.shape[0]}"
        )


def check_axes(method: Method, positions: Tensor) -> None:
    if positions.shape[-1] != method.num_axes:
        raise ValueError(
            f"positions: expected num_axes {method.num_axes} in the last dimension, "
            f"got {positions.shape[-1]}"
        )
