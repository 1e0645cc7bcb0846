"""Check the inputs of a rotation. Every function raises an error that names the argument.

Shapes and dtypes are checked first and values last. No tensors are created.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope._dtypes import FLOATING
from comrope.angles import (
    Angles,
    CollinearAngles,
    CommutingAngles,
    GeneralAngles,
    block_size_of,
)
from comrope.methods import Method
from comrope.positions import check_positions

__all__ = [
    "check_angles",
    "check_device",
    "check_device_of_angles",
    "check_num_axes",
    "check_projection",
    "check_qkv",
    "check_queries_and_keys",
    "check_single",
]


def check_queries_and_keys(
    method: Method,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    key_positions: Tensor | None,
    prefix: int,
) -> None:
    """Check queries (B, H G, T, D) and keys (B, H, T, D), or (B, H, S, D) with own positions."""
    _check_tensor(method, "q", q)
    _check_tensor(method, "k", k)
    _check_pair(method, q.shape, k.shape, same_length=key_positions is None)
    _check_call(method, q.shape, positions, prefix)
    check_device("k", k, "q", q.device)
    check_device("positions", positions, "q", q.device)
    if key_positions is not None:
        _check_call(method, k.shape, key_positions, prefix, "key_positions", "k")
        check_device("key_positions", key_positions, "q", q.device)


def check_single(method: Method, x: Tensor, positions: Tensor, prefix: int) -> None:
    """Check queries, keys or values (B, H G, T, D)."""
    _check_tensor(method, "x", x)
    _check_multiple(method, "x", x.shape)
    _check_call(method, x.shape, positions, prefix)
    check_device("positions", positions, "x", x.device)


def check_qkv(method: Method, qkv: Tensor, positions: Tensor, prefix: int) -> None:
    """Check one tensor (B, T, heads, D) of queries, keys and values."""
    heads = method.num_heads
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv: expected a tensor, got {type(qkv).__name__}")
    if qkv.ndim != 4 or qkv.shape[2] < 3 * heads:
        raise ValueError(
            f"qkv: expected shape (B, T, heads, D) with the heads of q, k and v, at least "
            f"{3 * heads}, got {tuple(qkv.shape)}"
        )
    batch, tokens, all_heads, dim = qkv.shape  # shapes alone: views take time
    of_k = torch.Size((batch, heads, tokens, dim))
    of_q = torch.Size((batch, all_heads - 2 * heads, tokens, dim))
    _check_vectors(method, "qkv", of_q, qkv.dtype)
    _check_pair(method, of_q, of_k)
    _check_call(method, of_q, positions, prefix)
    check_device("positions", positions, "qkv", qkv.device)


def check_projection(weight: Tensor, x: Tensor) -> None:
    """Check the weight (C, heads D) of a projection of x (B, heads, T, D)."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: expected a tensor, got {type(weight).__name__}")
    wide = x.shape[1] * x.shape[3]
    if weight.ndim != 2 or weight.shape[1] != wide or not weight.is_floating_point():
        raise ValueError(
            f"weight: expected floating numbers (C, {wide}), for {x.shape[1]} heads of "
            f"{x.shape[3]}, got {tuple(weight.shape)} of {weight.dtype}"
        )


def check_angles(method: Method, angles: Angles) -> None:
    """Check that precomputed angles have the sizes of a method."""
    if not isinstance(angles, (CommutingAngles, CollinearAngles, GeneralAngles)):
        raise TypeError(f"angles: expected the result of angles(), got {type(angles).__name__}")
    shape = _first_of(angles).shape
    axes, heads, dim = shape[0], shape[1], shape[2] * block_size_of(angles)
    if axes != method.num_axes or heads != method.num_heads or dim != method.head_dim:
        raise ValueError(
            f"angles: expected those of num_axes {method.num_axes}, num_heads {method.num_heads} "
            f"and head_dim {method.head_dim}, got {axes}, {heads} and {dim}"
        )


def check_device_of_angles(label: str, angles: Angles, other: str, device: torch.device) -> None:
    """Raise unless angles are on a device, that of the argument ``other``."""
    check_device(label, _first_of(angles), other, device)


def check_device(label: str, x: Tensor, other: str, device: torch.device) -> None:
    """Raise unless ``x`` is on a device, that of the argument ``other``."""
    if x.device != device:
        raise ValueError(f"{label}: expected the device of {other}, {device}, got {x.device}")


def _first_of(angles: Angles) -> Tensor:
    """Return the tensor (N, H, m, ...) of some angles."""
    if isinstance(angles, CommutingAngles):
        return angles.frequencies
    return angles.direction if isinstance(angles, CollinearAngles) else angles.skew


def check_num_axes(method: Method, positions: Tensor, label: str = "positions") -> None:
    """Check the last dimension of positions."""
    if positions.shape[-1] != method.num_axes:
        raise ValueError(
            f"{label}: expected num_axes {method.num_axes} in the last dimension, "
            f"got {positions.shape[-1]}"
        )


def _check_tensor(method: Method, label: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{label}: expected a tensor, got {type(x).__name__}")
    if x.ndim != 4:
        raise ValueError(f"{label}: expected shape (B, H, T, D), got {tuple(x.shape)}")
    _check_vectors(method, label, x.shape, x.dtype)


def _check_vectors(method: Method, label: str, shape: torch.Size, dtype: torch.dtype) -> None:
    if dtype not in FLOATING:
        raise ValueError(f"{label}: expected a floating dtype of 16 to 64 bits, got {dtype}")
    if shape[-1] != method.head_dim:
        raise ValueError(f"{label}: expected head_dim {method.head_dim}, got {shape[-1]}")


def _check_multiple(method: Method, label: str, shape: torch.Size) -> None:
    heads = method.num_heads
    if shape[1] == 0 or shape[1] % heads:
        raise ValueError(
            f"{label}: expected a multiple of {heads} heads in shape (B, H, T, D), got "
            f"{shape[1]}{_layout_hint(label, shape, heads)}"
        )


def _check_pair(method: Method, q: torch.Size, k: torch.Size, *, same_length: bool = True) -> None:
    heads = method.num_heads
    if k[1] != heads:
        raise ValueError(
            f"k: expected num_heads {heads} heads (those of the keys) in shape (B, H, T, D), got "
            f"{k[1]}{_layout_hint('k', k, heads)}"
        )
    _check_multiple(method, "q", q)
    if same_length and (q[0] != k[0] or q[2] != k[2]):
        raise ValueError(
            f"k: expected the batch and length of q {tuple(q)}, got {tuple(k)}; keys of another "
            "length need key_positions"
        )
    if q[0] != k[0]:
        raise ValueError(f"k: expected the batch size of q {tuple(q)}, got {tuple(k)}")


def _layout_hint(label: str, shape: torch.Size, heads: int) -> str:
    swapped = shape[2] and shape[2] % heads == 0
    return f"; for shape (B, T, H, D) pass {label}.transpose(1, 2)" if swapped else ""


def _check_call(
    method: Method,
    x: torch.Size,
    positions: Tensor,
    prefix: int,
    label: str = "positions",
    of: str = "q",
) -> None:
    """Check the prefix and the positions for vectors ``of`` of shape (B, H, T, D)."""
    tokens = x[2]
    if not isinstance(prefix, int) or not 0 <= prefix <= tokens:
        raise ValueError(
            f"num_prefix_tokens: expected 0 to {tokens}, the tokens of {of}, got {prefix}"
        )
    check_positions(label, positions)
    check_num_axes(method, positions, label)
    rows = positions.shape[-2]
    if rows != tokens and rows != tokens - prefix:
        expected = f"{tokens} rows, one per token" if not prefix else f"{tokens - prefix} rows"
        after = f" after {prefix} prefix tokens" if prefix else ""
        hint = " (class token? see with_class_token, num_prefix_tokens)" if rows < tokens else ""
        raise ValueError(f"{label}: expected {expected}{after}, got {rows}{hint}")
    if positions.ndim == 3 and positions.shape[0] not in (1, x[0]):
        raise ValueError(
            f"{label}: expected the batch size of {of}, {x[0]}, got {positions.shape[0]}"
        )
