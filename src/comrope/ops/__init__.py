"""Pure tensor functions: the slow obvious reference, the spectral rotation, the Triton kernels, and
one door that picks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comrope._dtypes import compute_dtype, no_autocast
from comrope.angles import Angles, Free, Line, Torus, block_size_of
from comrope.ops.collinear import rotate_line
from comrope.ops.dispatch import BACKENDS, Choice, choose_backend
from comrope.ops.folding import basis_into_inputs, basis_into_outputs, change_channels
from comrope.ops.layout import (
    at_every_token,
    halves_to_neighbours,
    neighbours_to_halves,
    to_blocks,
    unpack,
)
from comrope.ops.reference import rotate_reference, rotation_matrices
from comrope.ops.spectral import rotate_torus

__all__ = [
    "BACKENDS",
    "Choice",
    "basis_into_inputs",
    "basis_into_outputs",
    "choose_backend",
    "rotate",
    "rotate_one",
    "rotate_packed",
    "rotation_matrices",
    "unrotate",
    "unrotate_before",
]


def rotate(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    angles: Angles,
    *,
    backend: str = "auto",
    num_prefix_tokens: int = 0,
    channel_order: str = "interleaved",
) -> tuple[Tensor, Tensor]:
    """Rotate q (B, H G, T, D) and k (B, H, T, D) at positions (T', N) or (B, T', N).

    The scores of the result are those of R(x) q . R(y) k. The first ``num_prefix_tokens`` tokens
    stay unturned: T' is T, or T less their number. Computed in the widest dtype that comes in, at
    least float32, and returned in the dtypes of q and k.
    """
    chosen = choose_backend(angles, backend, q, k, positions, channel_order).backend
    if chosen == "triton":
        from comrope.ops.kernels.entry import rotate_on_gpu

        return rotate_on_gpu(q, k, positions, angles, num_prefix_tokens, channel_order == "half")
    positions = at_every_token(positions, q.shape[2], num_prefix_tokens)
    if channel_order == "half":
        q, k = halves_to_neighbours(q), halves_to_neighbours(k)
    q, k = _rotate_neighbours(q, k, positions, angles, chosen)
    if channel_order == "half":
        q, k = neighbours_to_halves(q), neighbours_to_halves(k)
    return q, k


def rotate_one(
    x: Tensor, positions: Tensor, angles: Angles, *, key_heads: int, **options: Any
) -> Tensor:
    """What ``rotate`` makes of x (B, H G, T, D), queries, keys or values; options as there."""
    share = x.shape[1] // key_heads
    # Keys with no query at all; or queries, with one of each group in the place of the key.
    q, k = (x[:, :0], x) if share == 1 else (x, x[:, ::share])
    return rotate(q, k, positions, angles, **options)[share == 1]


def unrotate(
    x: Tensor,
    positions: Tensor,
    angles: Angles,
    *,
    key_heads: int,
    backend: str = "auto",
    num_prefix_tokens: int = 0,
    channel_order: str = "interleaved",
) -> Tensor:
    """The inverse of ``rotate_one``, the basis that it leaves out included: x (B, H G, T, D).

    With values turned at their places and sums of them turned back at those of the queries,
    attention returns sum_j a_ij R(x_i)^T R(y_j) v_j: what commutes sees y_j - x_i there.
    ``angles`` should be the very ones: of a line, two spectra need not have the same basis.
    """
    options: dict[str, Any] = {"key_heads": key_heads, "num_prefix_tokens": num_prefix_tokens}
    options |= {"backend": backend, "channel_order": channel_order}
    turned, basis = _turn_back(x, positions, angles, widen=True, **options)
    if basis is not None:
        turned = change_channels(turned, basis.mT, channel_order)
    return turned.to(x.dtype)


def unrotate_before(
    x: Tensor, positions: Tensor, angles: Angles, weight: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """What ``unrotate`` makes of x (B, H G, T, D) and a projection ``weight`` (C, H G D) of that
    is the product of these two; options as there.

    The basis is multiplied into the weight, of which there is one, and not into every token.
    """
    turned, basis = _turn_back(x, positions, angles, widen=False, **options)
    x = turned.to(x.dtype)
    if basis is None:
        return x, weight
    order = options.get("channel_order", "interleaved")
    return x, basis_into_inputs(weight, x.shape[1], basis, order)


def _turn_back(
    x: Tensor,
    positions: Tensor,
    angles: Angles,
    *,
    widen: bool,
    key_heads: int,
    backend: str = "auto",
    channel_order: str = "interleaved",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``unrotate``, but for a basis that is still to be multiplied by, (H, m, b, b), if any; with
    ``widen`` it is not rounded before that."""
    chosen = choose_backend(angles, backend, x, x, positions, channel_order).backend
    options |= {"key_heads": key_heads, "backend": chosen, "channel_order": channel_order}
    parts = (part for part in angles if isinstance(part, Tensor))
    dtype = compute_dtype(x, positions, *parts)
    back = -positions.to(dtype)  # as numbers with a sign, whatever they came as
    if isinstance(angles, Line) and block_size_of(angles) == 2:
        angles = angles.plane()
    if chosen == "reference" or isinstance(angles, Free):  # nothing is left out, and R(-x) inverts
        return rotate_one(x, back, angles, **options), None
    basis = angles.basis if isinstance(angles, Torus) else None
    if isinstance(angles, Line):
        angles = angles.to(dtype).with_spectrum()
        basis = angles.spectrum()[0]
    if basis is None:
        return rotate_one(x, back, angles, **options), None
    if isinstance(angles, Torus):
        x = x.to(dtype) if widen else x
        angles = Torus(None, angles.frequencies, angles.block_size)
    else:  # of a line the basis is a constant (ops/line.py), and what it rotates is not in it yet
        x = change_channels(x.to(dtype), basis.mT, channel_order)
    return rotate_one(x, back, angles, **options), basis


def rotate_packed(
    qkv: Tensor,
    positions: Tensor,
    angles: Angles,
    *,
    key_heads: int,
    in_place: bool = False,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take q, k and v out of one tensor (B, T, H (G + 2), D), q and k rotated; options as above.

    ``in_place``: qkv is given away; where no gradient is wanted, a kernel turns q and k in it.
    """
    order = options.get("channel_order", "interleaved")
    chosen = choose_backend(angles, backend, qkv, qkv, positions, order).backend
    if chosen == "triton":
        from comrope.ops.kernels.entry import rotate_packed_on_gpu

        prefix = options.get("num_prefix_tokens", 0)
        halves = order == "half"
        return rotate_packed_on_gpu(qkv, key_heads, positions, angles, prefix, halves, in_place)
    q, k, v = unpack(qkv, key_heads)
    return *rotate(q, k, positions, angles, backend=chosen, **options), v


def _rotate_neighbours(
    q: Tensor, k: Tensor, positions: Tensor, angles: Angles, backend: str
) -> tuple[Tensor, Tensor]:
    """With neighbouring channels as planes and a position for every token."""
    dtype = compute_dtype(q, k, positions, *(part for part in angles if isinstance(part, Tensor)))
    block_size = block_size_of(angles)
    q_blocks, k_blocks = (to_blocks(x, k.shape[1], block_size) for x in (q, k))
    positions, angles = positions.to(dtype), angles.to(dtype)
    with no_autocast(q.device):
        if backend == "spectral" and isinstance(angles, Torus):
            out = rotate_torus(q_blocks, k_blocks, positions, angles)
        elif backend == "spectral" and isinstance(angles, Line):
            out = rotate_line(q_blocks, k_blocks, positions, angles)
        else:
            out = rotate_reference(q_blocks, k_blocks, positions, angles.matrices())
    return out[0].reshape(q.shape).to(q.dtype), out[1].reshape(k.shape).to(k.dtype)
