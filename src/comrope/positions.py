"""Coordinates: grids, scaling, class tokens, perturbation, offsets.

Positions are (T, N), shared by a batch, or (B, T, N), one set per sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from comrope import _checks
from comrope._deprecated import warn_deprecated
from comrope._dtypes import FLOATING, INTEGER, constants_like

__all__ = [
    "check_positions",
    "grid",
    "normalize",
    "perturb",
    "shift",
    "with_class_token",
]


def grid(
    shape: Sequence[int],
    *,
    scale: float | Sequence[float] = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the patch centres of a grid of any rank, the last axis running fastest.

    Args:
        shape: Patches per axis.
        scale: Each axis covers [0, scale]; one number or one per axis. 1 is the paper's relative
            scaling: patch j of X is at (j + 1/2) / X. With ``scale=shape`` the unit is a patch.
            With the grid of the training resolution it is a patch of training, for any ``shape``.
        device: Of the result.
        dtype: Of the result, by default torch's default dtype.

    Returns:
        Positions (T, N).
    """
    if not isinstance(shape, Iterable):
        raise ValueError(f"shape: expected one size per axis, such as ({shape!r},), got {shape!r}")
    sizes = tuple(_checks.integer("shape", size, 0) for size in shape)
    if not sizes:
        raise ValueError("shape: expected at least one axis, got none")
    scales = _checks.per_axis("scale", scale, len(sizes))
    axes = [
        (torch.arange(size, device=device, dtype=dtype or torch.get_default_dtype()) + 0.5)
        * (extent / max(size, 1))
        for size, extent in zip(sizes, scales, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def normalize(coordinates: Tensor, canvas: Sequence[float]) -> Tensor:
    """Divide raw coordinates (..., N) by the size of their canvas, axis by axis (Sec. 3.4)."""
    coordinates = _floating("coordinates", coordinates)
    sizes = _checks.per_axis("canvas", canvas, coordinates.shape[-1], positive=True)
    return coordinates / constants_like(sizes, coordinates)


def relative(coordinates: Tensor, canvas: Sequence[float]) -> Tensor:
    """Call ``normalize``; deprecated."""
    warn_deprecated("comrope.relative", "comrope.normalize")
    return normalize(coordinates, canvas)


def with_class_token(
    positions: Tensor, *, center: float | Sequence[float] = 0.5, count: int = 1
) -> Tensor:
    """Prepend the position of ``count`` class tokens: (..., T, N) to (..., count + T, N).

    Args:
        positions: (T, N) or (B, T, N).
        center: Where class tokens are, the centre of the canvas. For ``grid(..., scale=s)`` it is
            s / 2.
        count: How many there are.

    Call it after ``perturb`` and before ``shift``: a class token has no patch and is not perturbed,
    but an offset of the image moves it too. (An unrotated token is not moved by an offset, so
    scores with it change.)
    """
    positions = _floating("positions", positions)
    place = constants_like(_checks.per_axis("center", center, positions.shape[-1]), positions)
    place = place.expand(*positions.shape[:-2], _checks.integer("count", count, 0), -1)
    return torch.cat((place, positions), dim=-2)


def perturb(
    positions: Tensor,
    patch_size: float | Sequence[float],
    intensity: float,
    *,
    batch_size: int | None = None,
    axes: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Add the paper's perturbation, N(0, (intensity * patch)^2) clamped to the patch (Sec. 3.4).

    Args:
        positions: (T, N) or (B, T, N). Every token has a draw of its own.
        patch_size: In the units of the positions: 1 / 14 for ``grid((14, 14))``; one number or one
            per axis.
        intensity: Standard deviation in patches (the paper's sigma).
        batch_size: Draw once per sample and return (B, T, N); by default shared positions have one
            draw for the batch.
        axes: Axes to perturb, by default all.
        generator: By default torch's global one.
    """
    positions = _floating("positions", positions)
    num_axes = positions.shape[-1]
    patch = _checks.per_axis("patch_size", patch_size, num_axes)
    intensity = _checks.real("intensity", intensity)
    chosen = range(num_axes) if axes is None else tuple(axes)
    for axis in chosen:
        if axis not in range(num_axes):
            raise ValueError(f"axes: expected numbers from 0 to {num_axes - 1}, got {axis!r}")
    patch = tuple(size if axis in chosen else 0.0 for axis, size in enumerate(patch))
    reach = constants_like(patch, positions)
    positions = _per_sample(positions, batch_size)
    noise = _randn(positions.shape, positions, generator) * (intensity * reach)
    return positions + noise.clamp(-0.5 * reach, 0.5 * reach)


def shift(
    positions: Tensor,
    std: float,
    *,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Move all tokens by one offset N(0, std^2) per axis: the paper's offset test (Sec. 4.3.1).

    Positions (B, T, N), or shared ones (T, N) with ``batch_size``, get an offset for each sample.
    """
    std = _checks.real("std", std)
    positions = _per_sample(_floating("positions", positions), batch_size)
    offsets = (*positions.shape[:-2], 1, positions.shape[-1])
    return positions + std * _randn(offsets, positions, generator)


def rescale(
    positions: Tensor,
    most: float,
    *,
    center: float | Sequence[float] = 0.5,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Multiply distances from ``center`` by a factor in [1 / most, most]; deprecated.

    The logarithm of the factor is uniform; one factor per sample of positions (B, T, N), or of
    shared ones (T, N) with ``batch_size``.
    """
    warn_deprecated("comrope.rescale", "center + factor * (positions - center)")
    if _checks.real("most", most) < 1:
        raise ValueError(f"most: expected a factor of at least 1, got {most!r}")
    positions = _per_sample(_floating("positions", positions), batch_size)
    middle = constants_like(_checks.per_axis("center", center, positions.shape[-1]), positions)
    device = generator.device if generator is not None else positions.device
    shape = (*positions.shape[:-2], 1, 1)
    drawn = torch.rand(shape, generator=generator, device=device, dtype=positions.dtype)
    factor = ((2 * drawn - 1) * math.log(most)).exp().to(positions.device)
    return middle + factor * (positions - middle)


def check_positions(label: str, positions: Tensor) -> None:
    """Raise unless ``positions`` is (T, N) or (B, T, N), real and finite.

    Values are checked on the CPU only. On a GPU a check would synchronize; in a compiled graph or
    under vmap there are no values.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(f"{label}: expected a tensor, got {type(positions).__name__}")
    if positions.ndim not in (2, 3):
        raise ValueError(
            f"{label}: expected shape (T, N) or (B, T, N), got {tuple(positions.shape)}"
            + ("; for one axis use [:, None]" if positions.ndim == 1 else "")
        )
    if positions.dtype not in FLOATING and positions.dtype not in INTEGER:
        raise ValueError(
            f"{label}: expected real numbers of 16 to 64 bits or integers, got {positions.dtype}"
        )
    if not positions.is_floating_point() or positions.device.type != "cpu":
        return
    if torch.compiler.is_compiling():
        return
    try:
        # A sum is finite only if all of it is, and takes less time than the exact check. It may
        # overflow, too.
        finite = math.isfinite(positions.detach().sum().item()) or positions.isfinite().all()
    except RuntimeError:
        return
    if not finite:
        raise ValueError(f"{label}: expected finite numbers, got NaN or infinity among them")


def _floating(label: str, positions: Tensor) -> Tensor:
    """Check positions and convert integers to the default dtype."""
    check_positions(label, positions)
    return positions if positions.is_floating_point() else positions.to(torch.get_default_dtype())


def _per_sample(positions: Tensor, batch_size: int | None) -> Tensor:
    if batch_size is None:
        return positions
    _checks.integer("batch_size", batch_size, 0)
    if positions.ndim != 2:
        raise ValueError(
            f"batch_size: positions {tuple(positions.shape)} are per sample already; "
            f"expected None, got {batch_size}"
        )
    return positions.expand(batch_size, -1, -1)


def _randn(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else like.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)
