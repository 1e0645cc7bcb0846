"""The rotation in the eigenbasis: q' = diag_k(Rot(phi_k)) Q^T q with phi_k = sum_i w_ik x_i.

The final product with Q is left out: it is the same for q and k, so it cancels in their scores.
No exponential, no matrix per token.

Shapes: B batch, H key heads, G queries per key head, T tokens, D channels per head, m blocks per
head, b block size, f = b // 2 planes per block, P = m f planes per head, N axes. An odd b leaves
the last coordinate of every block unrotated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from comrope._dtypes import compute_dtype, in_function_transform, no_autocast
from comrope.angles import Angles, CommutingAngles
from comrope.ops.basis import change_basis
from comrope.ops.collinear import NoSecondDerivative, sums_over_tokens, to_commuting
from comrope.ops.layout import halves_to_neighbours, neighbours_to_halves
from comrope.ops.planes import cos_and_sin, rotate_planes, torque

__all__ = ["phases", "rotate_spectral", "sum_over_axes"]


def sum_over_axes(x: Tensor, w: Tensor) -> Tensor:
    """Return sum_i x_i w_i for x (..., N) and w (N, ...), which broadcast.

    The axes are added one by one. A matrix product may run in TF32, which keeps only ten bits.
    """
    total = x[..., 0] * w[0]
    for axis in range(1, w.shape[0]):
        total = total + x[..., axis] * w[axis]
    return total


def phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return phi = sum_i w_i x_i, (1 or B, H, 1, T, P).

    Args:
        positions: (T, N) or (B, T, N).
        frequencies: (N, H, P).
    """
    x = positions if positions.ndim == 3 else positions[None]
    return sum_over_axes(x[:, None, None, :, None, :], frequencies[:, :, None, None])


def rotate_spectral(
    vectors: tuple[Tensor, ...],
    positions: Tensor,
    angles: Angles,
    *,
    half: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, ...]:
    """Return diag_k(Rot(phi_k)) Q^T x for each of several x (B, H G, T, D), in its dtype.

    Args:
        vectors: Queries, keys or values.
        positions: (T, N) or (B, T, N), of every token.
        angles: The rotation.
        half: Whether planes are channels c and c + D / 2, and not neighbours.
        inverse: Rotate by -phi and leave out Q^T: the caller multiplies by Q.
    """
    dtype = compute_dtype(*vectors, positions, *(x for x in angles if isinstance(x, Tensor)))
    angles = to_commuting(angles.to(dtype))
    assert isinstance(angles, CommutingAngles)
    with no_autocast(positions.device):
        places = -positions.to(dtype) if inverse else positions.to(dtype)
        frequencies = angles.frequencies.flatten(2)
        if frequencies.stride(1) == 0 and angles.collinear is None:  # shared by all heads
            frequencies = frequencies[:, :1]
        phase = phases(places, frequencies)
        with torch.no_grad():
            cos, sin = cos_and_sin(phase)
        by_skew: tuple[Any, ...] = (None, None, None, None)
        if angles.collinear is not None and angles.collinear.sums is not None:
            direction, frequencies, sums, reach = angles.collinear
            with torch.no_grad():
                by_skew = phases(places, direction), frequencies, reach, sums
        heads, dim = angles.frequencies.shape[1], vectors[0].shape[-1]
        basis = None if inverse else angles.basis
        reorder = half and (basis is not None or 2 * phase.shape[-1] < dim)
        found = [x.unflatten(1, (heads, -1)) for x in vectors]
        if reorder:
            found = [halves_to_neighbours(x) for x in found]
        if basis is not None:
            found = [change_basis(x.to(basis.dtype), basis) for x in found]
        options = Options(half and not reorder, inverse, tuple(x.dtype for x in vectors))
        found = _rotate_vectors(options, found, phase, cos, sin, *by_skew)
        if reorder:
            found = [neighbours_to_halves(x) for x in found]
        return tuple(x.reshape(y.shape) for x, y in zip(found, vectors, strict=True))


class Options(NamedTuple):
    """How planes are rotated."""

    half: bool
    inverse: bool  # the basis follows the rotation, and does not precede it
    dtypes: tuple[torch.dtype, ...]  # of the outputs


def _rotate_vectors(
    options: Options, vectors: list[Tensor], phase: Tensor, cos: Tensor, sin: Tensor, *by_skew: Any
) -> list[Tensor]:
    """Rotate the planes of each x (B, H, G, T, D) by a phase (1 or B, H, 1, T, P)."""
    transformed = in_function_transform()
    if transformed and by_skew[-1] is None:
        cos, sin = phase.cos(), phase.sin()
    elif transformed or _needs_grad(phase, *vectors):
        return [*_Rotate.apply(options, phase, cos, sin, *by_skew, *vectors)]
    return [
        rotate_planes(x.to(cos.dtype), cos, sin, options.half).to(dtype)
        for x, dtype in zip(vectors, options.dtypes, strict=True)
    ]


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class _Rotate(torch.autograd.Function):
    """Rotate planes. The outputs are saved for the backward pass, which attention saves anyway.

    ``scale`` (1 or B, H, 1, T, m), ``frequencies`` (H, m, f), ``reach`` and ``sums`` are those of
    collinear angles, see ``ops.collinear``, or None.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        options: Options, phase: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None,
        frequencies: Tensor | None, reach: Tensor | None, sums: Tensor | None, *vectors: Tensor,
    ) -> Any:  # fmt: skip
        # torch.compile (2.11) silently loses the gradient of an output that is a view.
        copy = torch.compiler.is_compiling()
        return tuple(
            rotate_planes(x.to(phase.dtype), cos, sin, options.half).to(dtype, copy=copy)
            for x, dtype in zip(vectors, options.dtypes, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[0]
        ctx.dtypes = [x.dtype for x in inputs[8:]]
        ctx.save_for_backward(*inputs[1:8], *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        phase, cos, sin, *rest = ctx.saved_tensors
        outputs, half = rest[4:], ctx.options.half
        twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if twice:  # as functions of the phase, for second derivatives
            cos, sin = phase.cos(), phase.sin()
        after, grad_after = ([x.to(phase.dtype) for x in xs] for xs in (outputs, grads))
        grad_before = [rotate_planes(x, cos, -sin, half) for x in grad_after]
        pairs = [*zip(after, grad_after, strict=True)]
        found: list[Any] = [None, None]
        found += [x.to(dtype) for x, dtype in zip(grad_before, ctx.dtypes, strict=True)]
        if ctx.needs_input_grad[1]:
            found[0] = sum(torque(*xs, cos.shape[-1], half).sum_to_size(cos.shape) for xs in pairs)
        if ctx.needs_input_grad[7]:
            groups: Any = after, grad_after, grad_before
            if half:
                groups = ([halves_to_neighbours(x) for x in xs] for xs in groups)
            found[1] = sums_over_tokens(
                groups, cos, sin, rest[0], rest[1], rest[2], ctx.options.inverse
            )
            if twice:
                found = [
                    x if x is None else NoSecondDerivative.apply(x, phase, *grads) for x in found
                ]
        return None, found[0], None, None, None, None, None, *found[1:]
