"""Multiples of one skew-symmetric matrix, R = exp(s S), with gradients that are exact everywhere.

The value is the spectral rotation in the eigenbasis of S. That eigenbasis is not smooth where
frequencies repeat or vanish (among them S = 0, where fine-tuning starts), but the exponential is.
Its derivative (Daleckii and Krein) is

    d exp(sS)[E] = V (Phi o (V* E V)) V*,  Phi_jk = (exp(isw_j) - exp(isw_k)) / (i(w_j - w_k)).

Summed over tokens, the numerator is the outer product of gradient and vector before the rotation
minus the one after it. The sum before the rotation is the gradient of the basis, which autograd
computes like that of any other basis. The rotation adds the sum after it, so that its output may be
used in any way, not only in scores. Where two frequencies are too close for the quotient, its limit
is the mean of the two sums, weighted by s. Only blocks with two such frequencies need it.

All numbers are real: a real 2x2 block between planes j and k is the sum of a part that commutes
with J, which depends on the difference of the two frequencies, and a part that anticommutes with
it, which depends on their sum.

Shapes: B batch, H key heads, G queries per key head, T tokens, D channels per head, m blocks per
head, b block size, f = b // 2 planes per block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from comrope._dtypes import (
    in_function_transform,
    is_compiling_for_cpu,
    no_autocast,
    tf32_allowed,
)
from comrope.angles import (
    Angles,
    CollinearAngles,
    CommutingAngles,
    SkewSpectrum,
    plane_generators,
    skew_spectrum,
)
from comrope.ops.basis import small_product, sum_outer
from comrope.ops.planes import rotate_planes

__all__ = ["NoSecondDerivative", "skew_gradient", "sums_over_tokens", "to_commuting"]


def to_commuting(angles: Angles, positions: Tensor | None = None) -> Angles:
    """Return collinear angles in the spectral form, with the gradient of S; others unchanged.

    Args:
        angles: Of any form.
        positions: (..., N). Give them if the rotated vectors are used through scores only, and
            values through their weighted sums. Then sums over tokens are needed only for pairs of
            planes that these positions hardly tell apart.
    """
    if not isinstance(angles, CollinearAngles):
        return angles
    skew, direction = angles.skew, angles.direction
    if skew.shape[-1] == 2:
        return angles.as_commuting()
    basis, frequencies = angles.cached_spectrum or skew_spectrum(skew.detach())
    found = None
    if torch.is_grad_enabled() and skew.requires_grad:
        reach = None  # also for positions of a wrong shape, which the rotation refuses
        if positions is not None and positions.ndim > 1 and positions.shape[-1] == len(direction):
            reach = _reach_of(positions, direction)
        basis, frequencies, sums = _Decompose.apply(skew, basis, frequencies, reach)
        if reach is not None and _can_select(reach):
            sums = sums if _needed(frequencies, skew.shape[-1], reach).any() else None
        found = SkewSpectrum(direction, frequencies, sums, reach)
    return CommutingAngles(basis, direction[..., None] * frequencies, skew.shape[-1], found)


class _Decompose(torch.autograd.Function):
    """Return the basis and frequencies of S, and zeros whose gradient are sums over tokens.

    Through the three, S gets the gradient of a function of exp(s S): see ``sums_over_tokens``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(skew: Tensor, basis: Tensor, frequencies: Tensor, reach: Tensor | None) -> Any:
        heads, blocks, size, _ = basis.shape
        sums = basis.new_zeros(heads, blocks, 2 * size * size + 2)
        return basis.clone(), frequencies.clone(), sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_basis: Tensor, grad_frequencies: Tensor, sums: Tensor) -> Any:
        skew, basis, frequencies, reach = ctx.saved_tensors
        with torch.no_grad(), no_autocast(skew.device):
            size = basis.shape[-1]
            after, limit = (t.unflatten(-1, (size, size)) for t in sums[..., 2:].chunk(2, dim=-1))
            numerator = small_product(grad_basis.mT, basis) - after
            if reach is None:
                reach, known = _reach(*sums[..., :2].unbind(-1)), limit.isfinite().flatten(2).all(2)
            else:
                known = _needed(frequencies, size, reach)
            # Of one plane alone, the limit is the gradient of its frequency.
            own = plane_generators(0.5 * grad_frequencies, size)
            limit = torch.where(known[..., None, None], limit, own)
            inner = skew_gradient(numerator, limit, known, reach, frequencies)
            grad = small_product(small_product(basis, inner), basis.mT)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grad = NoSecondDerivative.apply(grad, skew, grad_basis, grad_frequencies, sums)
        return grad, None, None, None


def sums_over_tokens(
    groups: Iterable[list[Tensor]], cos: Tensor, sin: Tensor, scale: Tensor, frequencies: Tensor,
    reach: Tensor | None, inverse: bool,
) -> Tensor:  # fmt: skip
    """Return what a rotation adds to the gradient of S, in the layout of ``_Decompose``.

    Args:
        groups: Rotated vectors (B, H, G, T, D), such as queries and keys; their gradients; their
            gradients before the rotation.
        cos, sin: Of the phases, (1 or B, H, 1, T, P).
        scale: s of every token, (1 or B, H, 1, T, m).
        frequencies: Of S, (H, m, f).
        reach: As in ``SkewSpectrum``.
        inverse: The basis follows the rotation, and does not precede it.

    Returns:
        (H, m, 2 b b + 2): sum |g|^2, sum |g|^2 |s|^3, the sum of g x^T on the side without the
        basis, and the limit, half the sum of s g x^T before and after. The limit is infinite in
        blocks that do not need it. With ``reach``, only the limit is computed.
    """
    compute: Any = _sums_op if is_compiling_for_cpu(cos) else _sums
    return compute(*groups, cos, sin, scale, frequencies, reach, inverse)


@torch.no_grad()
def _sums(
    after: list[Tensor], grad_after: list[Tensor], grad_before: list[Tensor], cos: Tensor,
    sin: Tensor, scale: Tensor, frequencies: Tensor, reach: Tensor | None, inverse: bool,
) -> Tensor:  # fmt: skip
    heads, blocks, _ = frequencies.shape
    size = after[0].shape[-1] // blocks
    mass = cubes = frequencies.new_zeros(heads, blocks)
    outer = frequencies.new_zeros(heads, blocks, size, size)
    if reach is None:
        if inverse:
            before = (rotate_planes(x, cos, -sin) for x in after)
            pairs = zip(grad_before, before, strict=True)
        else:
            pairs = zip(grad_after, after, strict=True)
        for g, x in pairs:
            outer = outer - sum_outer(g, x, size) if inverse else outer + sum_outer(g, x, size)
        shared = [dim for dim in (0, 2) if scale.shape[dim] == 1]
        for g in grad_after:
            weight = (g * g).sum(shared, keepdim=True)
            weight = weight.unflatten(-1, (blocks, size)).sum(-1)  # (1 or B, H, 1, T, m)
            mass = mass + weight.sum((0, 2, 3))
            cubes = cubes + (weight * scale.abs() ** 3).sum((0, 2, 3))
        reach = _reach(mass, cubes)
    needed = _needed(frequencies, size, reach)
    limit = torch.full_like(outer, torch.inf)
    select = _can_select(needed)
    if not select or needed.any():
        every = torch.arange(heads * blocks, device=needed.device)
        chosen = needed.nonzero(as_tuple=True) if select else (every // blocks, every % blocks)

        def part(x: Tensor) -> Tensor:  # (B, H, G, T, ...) to (chosen, B, G, T, ...)
            return x.unflatten(-1, (blocks, -1)).movedim((1, 4), (0, 1))[chosen]

        s, c, d = part(scale), part(cos), part(sin)
        total = outer.new_zeros(len(chosen[0]), size, size)
        for vectors in zip(after, grad_after, grad_before, strict=True):
            x, g, h = map(part, vectors)
            for left, right in ((g, x), (h, rotate_planes(x, c, -d))):
                total = total + (s * left).flatten(1, 3).mT @ right.flatten(1, 3)
        limit = limit.index_put(chosen, 0.5 * total)
    parts = (mass[..., None], cubes[..., None], outer.flatten(2), limit.flatten(2))
    return torch.cat(parts, dim=-1)


@torch.library.custom_op("comrope::sums_over_tokens", mutates_args=())
def _sums_op(
    after: list[Tensor], grad_after: list[Tensor], grad_before: list[Tensor], cos: Tensor,
    sin: Tensor, scale: Tensor, frequencies: Tensor, reach: Tensor | None, inverse: bool,
) -> Tensor:  # fmt: skip
    """Select blocks by value, which a compiled graph cannot do."""
    return _sums(after, grad_after, grad_before, cos, sin, scale, frequencies, reach, inverse)


@_sums_op.register_fake
def _(after, grad_after, grad_before, cos, sin, scale, frequencies, reach, inverse):  # type: ignore[no-untyped-def]
    heads, blocks, _ = frequencies.shape
    return frequencies.new_empty(heads, blocks, 2 * (after[0].shape[-1] // blocks) ** 2 + 2)


def _can_select(x: Tensor) -> bool:
    """Return whether values of x may decide: not in graphs and transforms, and a GPU would wait."""
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or in_function_transform())


def _reach_of(positions: Tensor, direction: Tensor) -> Tensor:
    """Return the root mean square of s = sum_i c_i x_i over all tokens, (H, m)."""
    with torch.no_grad(), no_autocast(positions.device):
        x = positions.to(direction.dtype).flatten(0, -2)
        moments = x.mT @ x / max(x.shape[0], 1)
        square = (direction * torch.einsum("ij,jhm->ihm", moments, direction)).sum(0)
        return square.clamp_min(0).sqrt()


class NoSecondDerivative(torch.autograd.Function):
    """The identity on a gradient; its own derivative raises an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, *_: Tensor) -> Any:
        return grad.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "comrope: the spectral backend has no second derivative for angle matrices that are "
            "multiples of one, as those of 'comrope-ld'; use backend='reference'"
        )


def _precision_of_sums(like: Tensor) -> float:
    """Return the relative precision of the sums over tokens.

    They are matrix products, which a GPU may be allowed to compute in TF32.
    """
    in_tf32 = like.dtype == torch.float32 and like.device.type == "cuda" and tf32_allowed()
    return 5e-4 if in_tf32 else torch.finfo(like.dtype).eps


def skew_gradient(
    numerator: Tensor, limit: Tensor, known: Tensor, reach: Tensor, frequencies: Tensor
) -> Tensor:
    """Return the gradient of S in its eigenbasis (H, m, b, b), from sums over tokens.

    Args:
        numerator: sum g x^T before the rotation minus after it, (H, m, b, b), for vectors x and
            gradients g in the eigenbasis.
        limit: Half the sum of s g x^T before and after, (H, m, b, b).
        known: Whether ``limit`` is that of all pairs of planes, or of each plane alone, (H, m).
        reach: One |s| for all tokens, (H, m).
        frequencies: Of S, (H, m, f).
    """
    size, eps = limit.shape[-1], _precision_of_sums(numerator)
    if size % 2:  # padding makes the unrotated coordinate a plane of frequency zero
        numerator, limit = (pad(t, (0, 1, 0, 1)) for t in (numerator, limit))
    numerator = _multiply_rows_by_j(numerator)
    difference, total = _gaps(frequencies, size)
    by_difference, by_total = (
        _divided(numerator, gap, limit, _is_close(gap, reach, eps) & known[..., None, None])
        for gap in (difference, total)
    )
    return (_commuting_part(by_difference - by_total) + by_total)[..., :size, :size]


def _needed(frequencies: Tensor, size: int, reach: Tensor) -> Tensor:
    """Return the blocks (H, m) with two planes, or one that hardly turns, too close to divide."""
    difference, total = _gaps(frequencies, size)
    eps = _precision_of_sums(frequencies)
    close = _is_close(difference, reach, eps).triu(1) | _is_close(total, reach, eps)
    return close.flatten(2).any(2)


def _gaps(frequencies: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the differences and the sums of every two frequencies of a block, (H, m, f, f)."""
    if size % 2:
        frequencies = pad(frequencies, (0, 1))
    first, second = frequencies[..., :, None], frequencies[..., None, :]
    return first - second, first + second


def _reach(mass: Tensor, cubes: Tensor) -> Tensor:
    """Return one |s| for all tokens: the cubic mean, weighted by gradient.

    The largest |s| could be that of a distant token without gradient (padding).
    """
    return (cubes / torch.where(mass > 0, mass, 1.0)) ** (1 / 3)


def _is_close(gap: Tensor, reach: Tensor, eps: float) -> Tensor:
    """Return where two frequencies are too close for a quotient.

    With weights w of the tokens, the error of the limit is gap^2 sum w |s|^3 / 12 and that of the
    quotient eps sum w / gap. They are equal where (reach gap)^3 = 12 eps: there both are about
    1e-5 of the gradient in float32 and 1e-11 in float64.
    """
    return gap.abs() * reach[..., None, None] <= (12 * eps) ** (1 / 3)


def _divided(numerator: Tensor, gap: Tensor, limit: Tensor, is_close: Tensor) -> Tensor:
    """Return numerator / gap, or its limit where the gap is too small for the quotient."""
    gap, is_close = (
        t.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
        for t in (gap, is_close | (gap == 0))
    )
    return torch.where(is_close, limit, numerator / torch.where(is_close, 1.0, gap))


def _multiply_rows_by_j(matrix: Tensor) -> Tensor:
    """Return J X for every pair of rows: division by i, with the sign of the gradient."""
    first, second = matrix[..., 0::2, :], matrix[..., 1::2, :]
    return torch.stack((-second, first), dim=-2).flatten(-3, -2)


def _commuting_part(matrix: Tensor) -> Tensor:
    """Return (X + J X J^T) / 2 for every 2x2 block X: the part that commutes with J."""
    return 0.5 * (matrix + _multiply_rows_by_j(_multiply_rows_by_j(matrix.mT).mT))
