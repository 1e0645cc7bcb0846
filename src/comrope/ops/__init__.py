"""Pure tensor functions: the reference, the spectral rotation, the Triton kernels, and the
functions that select among them.

Shapes: B batch, H key heads, G queries per key head, T tokens, D channels per head, N axes,
m blocks per head, b block size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comrope._dtypes import compute_dtype, no_autocast
from comrope.angles import Angles, CollinearAngles, CommutingAngles, block_size_of
from comrope.ops.collinear import to_commuting
from comrope.ops.dispatch import BACKENDS, BackendChoice, select_backend
from comrope.ops.folding import change_channels, fold_into_inputs, fold_into_outputs
from comrope.ops.layout import (
    at_every_token,
    halves_to_neighbours,
    neighbours_to_halves,
    to_blocks,
    unpack,
)
from comrope.ops.reference import rotate_reference, rotation_matrices
from comrope.ops.spectral import rotate_spectral

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "fold_into_inputs",
    "fold_into_outputs",
    "inverse_with_projection",
    "rotate",
    "rotate_qkv",
    "rotate_single",
    "rotation_matrices",
    "select_backend",
    "to_commuting",
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
    """Rotate queries and keys so that their scores are those of R(x) q . R(y) k.

    Args:
        q: (B, H G, T, D).
        k: (B, H, T, D).
        positions: (T', N) or (B, T', N); T' is T, or T without the prefix tokens.
        angles: The rotation.
        backend: One of ``BACKENDS``.
        num_prefix_tokens: Leading tokens that are left unrotated.
        channel_order: ``"interleaved"`` or ``"half"``.

    Returns:
        Rotated q and k in their dtypes. Computed in the widest dtype of all arguments, at least
        float32.
    """
    selected = select_backend(angles, backend, q, k, positions, channel_order).backend
    if selected == "triton":
        from comrope.ops.kernels.operators import rotate_on_gpu

        return rotate_on_gpu(q, k, positions, angles, num_prefix_tokens, channel_order == "half")
    positions = at_every_token(positions, q.shape[2], num_prefix_tokens)
    half = channel_order == "half"
    if selected == "spectral":
        q, k = rotate_spectral((q, k), positions, angles, half=half)
        return q, k
    return _rotate_reference(q, k, positions, angles, half)


def rotate_single(
    x: Tensor,
    positions: Tensor,
    angles: Angles,
    *,
    key_heads: int,
    inverse: bool = False,
    **options: Any,
) -> Tensor:
    """Rotate x (B, H G, T, D), queries, keys or values, as ``rotate`` does; the same options.

    With ``inverse``, undo the rotation, including the basis that the spectral rotation omits.
    Pass the same ``angles`` to both: two eigendecompositions may give different bases.
    """
    if inverse:
        rotated, basis = _rotate_back(x, positions, angles, key_heads=key_heads, **options)
        if basis is not None:
            order = options.get("channel_order", "interleaved")
            rotated = change_channels(rotated, basis.mT, order)
        return rotated.to(x.dtype)
    share = x.shape[1] // key_heads
    # Either keys without queries, or queries with one of each group as the key.
    q, k = (x[:, :0], x) if share == 1 else (x, x[:, ::share])
    return rotate(q, k, positions, angles, **options)[share == 1]


def inverse_with_projection(
    x: Tensor, positions: Tensor, angles: Angles, weight: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Split ``weight`` times the inverse rotation of x into a cheaper vector and weight.

    Args:
        x: (B, H G, T, D).
        positions: As in ``rotate``.
        angles: The rotation.
        weight: (C, H G D), of the projection of x.
        options: As in ``rotate_single``.

    Returns:
        A vector and a weight with the same product as ``rotate_single(x, inverse=True)`` and
        ``weight``: the basis is multiplied into the weight once, not into every token.
    """
    rotated, basis = _rotate_back(x, positions, angles, round_early=True, **options)
    x = rotated.to(x.dtype)
    if basis is None:
        return x, weight
    order = options.get("channel_order", "interleaved")
    return x, fold_into_inputs(weight, basis, order, heads=x.shape[1])


def rotate_qkv(
    qkv: Tensor,
    positions: Tensor,
    angles: Angles,
    *,
    key_heads: int,
    inplace: bool = False,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split one tensor (B, T, H (G + 2), D) into q, k and v, and rotate q and k.

    Options as in ``rotate``. ``inplace`` allows overwriting qkv: where no gradient is needed, a
    kernel rotates q and k in it.
    """
    order = options.get("channel_order", "interleaved")
    selected = select_backend(angles, backend, qkv, qkv, positions, order).backend
    if selected == "triton":
        from comrope.ops.kernels.operators import rotate_packed_on_gpu

        prefix = options.get("num_prefix_tokens", 0)
        halves = order == "half"
        return rotate_packed_on_gpu(qkv, key_heads, positions, angles, prefix, halves, inplace)
    q, k, v = unpack(qkv, key_heads)
    return *rotate(q, k, positions, angles, backend=selected, **options), v


def _rotate_back(
    x: Tensor,
    positions: Tensor,
    angles: Angles,
    *,
    key_heads: int,
    backend: str = "auto",
    num_prefix_tokens: int = 0,
    channel_order: str = "interleaved",
    round_early: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Undo the rotation up to a basis, and return x and that basis (H, m, b, b) or None.

    The caller multiplies x by the basis. ``round_early`` rounds x to its own dtype before.
    """
    selected = select_backend(angles, backend, x, x, positions, channel_order).backend
    dtype = compute_dtype(x, positions, *(part for part in angles if isinstance(part, Tensor)))
    if selected == "spectral":
        angles, half = to_commuting(angles.to(dtype)), channel_order == "half"
        assert isinstance(angles, CommutingAngles)
        positions = at_every_token(positions, x.shape[2], num_prefix_tokens)
        x = x if round_early else x.to(dtype)
        (x,) = rotate_spectral((x,), positions, angles, half=half, inverse=True)
        return x, angles.basis
    back = -positions.to(dtype)  # unsigned integers have no sign
    options: dict[str, Any] = {
        "key_heads": key_heads,
        "backend": selected,
        "channel_order": channel_order,
        "num_prefix_tokens": num_prefix_tokens,
    }
    if isinstance(angles, CollinearAngles) and block_size_of(angles) == 2:
        angles = angles.as_commuting()
    basis = None
    if selected == "triton" and isinstance(angles, CollinearAngles):
        angles = angles.to(dtype).cache_spectrum()
        basis = angles.spectrum()[0]  # the kernel applies it again, as a constant
        x = change_channels(x.to(dtype), basis.mT, channel_order)
    elif selected == "triton" and isinstance(angles, CommutingAngles) and angles.basis is not None:
        basis, x = angles.basis, x if round_early else x.to(dtype)
        angles = CommutingAngles(None, angles.frequencies, angles.block_size)
    return rotate_single(x, back, angles, **options), basis  # without a basis R(-x) inverts


def _rotate_reference(
    q: Tensor, k: Tensor, positions: Tensor, angles: Angles, half: bool
) -> tuple[Tensor, Tensor]:
    """Rotate where every token has a position."""
    dtype = compute_dtype(q, k, positions, *(part for part in angles if isinstance(part, Tensor)))
    q_blocks, k_blocks = (
        to_blocks(halves_to_neighbours(x) if half else x, k.shape[1], block_size_of(angles))
        for x in (q, k)
    )
    with no_autocast(q.device):
        matrices = angles.to(dtype).matrices()
        out = rotate_reference(q_blocks, k_blocks, positions.to(dtype), matrices)
    q_out, k_out = (x.reshape(y.shape).to(y.dtype) for x, y in zip(out, (q, k), strict=True))
    return (neighbours_to_halves(q_out), neighbours_to_halves(k_out)) if half else (q_out, k_out)
