"""Measures of a position encoding: whether it commutes, whether it is relative, what it learned.

Every function takes a ``RotaryEmbedding``, trained or not.

Shapes: N axes, H key heads, T tokens, D channels per head, m blocks per head, b block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comrope._dtypes import compute_dtype, no_autocast, to_compute_dtype
from comrope.angles import skew_spectrum
from comrope.rotary import RotaryEmbedding

__all__ = [
    "axis_frequencies",
    "commutator_norms",
    "offset_sensitivity",
    "rope_equation_error",
    "rotary_modules",
    "scores",
    "similarity_map",
    "wavelengths",
]


def rotary_modules(model: nn.Module) -> dict[str, RotaryEmbedding]:
    """Return every ``RotaryEmbedding`` inside a model, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RotaryEmbedding)
    }


@torch.no_grad()
def commutator_norms(rope: RotaryEmbedding) -> Tensor:
    """Return ||A_i A_j - A_j A_i|| / (||A_i|| ||A_j||) for all pairs of axes and every block.

    Returns:
        (N, N, H, m). Zero up to rounding (1e-7 in float32) means that the encoding is relative (the
        paper's Theorem 1); random matrices give about one half. Zero where an angle matrix is zero.
    """
    _check(rope)
    a = rope.angle_matrices().double()
    products = a[:, None] @ a[None]
    norms = torch.linalg.matrix_norm(a)
    scale = norms[:, None] * norms[None]
    commutators = torch.linalg.matrix_norm(products - products.transpose(0, 1))
    return commutators / torch.where(scale > 0, scale, 1.0)


@torch.no_grad()
def rope_equation_error(rope: RotaryEmbedding, x: Tensor, y: Tensor) -> Tensor:
    """Return ||R(x)^T R(y) - R(y - x)||, the error of the RoPE equation.

    Args:
        rope: The encoding.
        x: Positions (T, N).
        y: Positions (T, N).

    Returns:
        (T, H, m). About 1e-5 for a relative encoding with positions in [0, 1] in float32.
    """
    _check(rope)
    left = rope.rotation_matrices(x).mT @ rope.rotation_matrices(y)
    return torch.linalg.matrix_norm(left - rope.rotation_matrices(y - x))


def scores(rope: RotaryEmbedding, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """Return attention scores (B, H, T, T) before scaling and softmax, in float32 or wider."""
    q, k = (to_compute_dtype(x) for x in rope(q, k, positions))
    with no_autocast(q.device):
        return q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT


@torch.no_grad()
def offset_sensitivity(
    rope: RotaryEmbedding,
    positions: Tensor,
    offset: float | Sequence[float] | Tensor,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Return how much scores change when all positions move by one offset.

    Args:
        rope: The encoding.
        positions: (T, N) or (B, T, N).
        offset: One number or one per axis, in the units of the positions.
        q: Queries, by default random.
        k: Keys, by default random.
        generator: For the random ones.

    Returns:
        The largest change, divided by the standard deviation of the scores. For a relative encoding
        it is rounding: in float32 about 1e-5 for an offset of 1, and below 1e-3 for 100. Unrotated
        prefix tokens do not move with the others, so they count as a change.
    """
    _check(rope)
    batch = positions.shape[0] if positions.ndim == 3 else 1
    shape = (batch, rope.num_heads, positions.shape[-2], rope.head_dim)
    device = positions.device if generator is None else generator.device
    dtype = compute_dtype(positions)
    q, k = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype).to(positions.device)
        if x is None
        else x
        for x in (q, k)
    )
    before = scores(rope, q, k, positions)
    after = scores(rope, q, k, positions + torch.as_tensor(offset).to(positions.device, dtype))
    return float((after - before).abs().max() / before.std())


@torch.no_grad()
def axis_frequencies(rope: RotaryEmbedding) -> Tensor:
    """Return the frequencies of each axis alone, |w| (N, H, m, b // 2), descending.

    Unlike ``rope.spectrum()`` it needs no common basis, so it works for LieRE. Every axis is sorted
    separately, so entry k of two axes need not be the same plane.
    """
    _check(rope)
    return skew_spectrum(rope.angle_matrices().detach())[1]


@torch.no_grad()
def wavelengths(rope: RotaryEmbedding) -> Tensor:
    """Return the wavelengths 2 pi / |w| of every head and axis (N, H, D // 2), ascending.

    In units of the positions, such as tokens per turn. Infinite where a plane does not rotate with
    an axis. Each axis is sorted separately.
    """
    return (2 * torch.pi / axis_frequencies(rope).flatten(2)).sort().values


@torch.no_grad()
def similarity_map(
    rope: RotaryEmbedding, positions: Tensor, origin: Sequence[float] | Tensor
) -> Tensor:
    """Return the similarity of a vector at ``origin`` and the same vector at every position.

    Args:
        rope: The encoding.
        positions: (T, N).
        origin: (N,).

    Returns:
        (H, T), at most 1: the expectation of v . R(origin)^T R(x) v / |v|^2 over random v, which is
        the mean of cos(phase) over the planes of a head.
    """
    _check(rope)
    place = torch.as_tensor(origin).to(positions).reshape(1, -1)
    rotations = rope.rotation_matrices(torch.cat((place, positions)))
    relative = rotations[0].mT @ rotations[1:]  # (T, H, m, b, b)
    trace = relative.diagonal(dim1=-2, dim2=-1).sum((-2, -1))
    return trace.mT / rope.head_dim


def _check(rope: RotaryEmbedding) -> None:
    if not isinstance(rope, RotaryEmbedding):
        raise TypeError(
            f"rope: expected a RotaryEmbedding, got {type(rope).__name__}; rotary_modules(model) "
            "returns those inside a model"
        )
