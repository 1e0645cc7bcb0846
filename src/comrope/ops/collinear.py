"""Rotation by multiples of one skew-symmetric matrix, R = exp(s S), with gradients that are exact
everywhere.

The value is the spectral rotation in the eigenbasis of S. The gradient does not go through that
eigenbasis, which is not smooth where frequencies repeat or vanish (among them S = 0, where
fine-tuning starts). It comes from the derivative of the exponential (Daleckii and Krein):

    d exp(sS)[E] = V (Phi o (V* E V)) V*,  Phi_jk = (exp(isw_j) - exp(isw_k)) / (i(w_j - w_k)).

Summed over tokens, the numerator is the outer product of gradient and vector before the rotation
minus the one after it: two matrix products, and no matrix per token. Where two frequencies are too
close for the quotient, its limit is the mean of the two, weighted by s.

All numbers are real: a real 2x2 block between planes j and k is the sum of a part that commutes
with J, which depends on the difference of the two frequencies, and a part that anticommutes with
it, which depends on their sum.

Shapes: B batch, H key heads, G queries per key head, T tokens, m blocks per head, b block size,
f = b // 2 planes per block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from comrope._dtypes import no_autocast, tf32_allowed
from comrope.angles import CollinearAngles, skew_spectrum
from comrope.ops.spectral import (
    change_basis,
    phases,
    rotate_commuting,
    rotate_planes,
    small_product,
)

__all__ = ["rotate_collinear", "skew_gradient"]


def rotate_collinear(
    q: Tensor, k: Tensor, positions: Tensor, angles: CollinearAngles
) -> tuple[Tensor, Tensor]:
    """Rotate blocks q (B, H, G, T, m, b) and k (B, H, 1, T, m, b) at positions (..., T, N)."""
    skew, direction = angles.skew, angles.direction
    if skew.shape[-1] == 2:
        return rotate_commuting(q, k, positions, angles.as_commuting())
    basis, frequencies = angles.cached_spectrum or skew_spectrum(skew.detach())
    scale = phases(positions, direction[..., None])[..., 0]  # (1 or B, H, 1, T, m)
    with torch.no_grad():  # from positions and frequencies at once: one rounding less than via s
        phase = phases(positions, direction[..., None] * frequencies)
    return (
        _RotateCollinear.apply(q, scale, skew, basis, frequencies, phase),
        _RotateCollinear.apply(k, scale, skew, basis, frequencies, phase),
    )


class _RotateCollinear(torch.autograd.Function):
    """Map x (B, H, G, T, m, b) to Q^T exp(s S) x with a constant Q, which cancels in the scores.

    Differentiable in x, s and S. Q, the frequencies w of S and the phases s w are functions of S.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, skew: Tensor, basis: Tensor, frequencies: Tensor, phase: Tensor
    ) -> Any:
        wide = change_basis(x.to(basis.dtype), basis)
        rotated = rotate_planes(wide, phase.cos(), phase.sin())
        # torch.compile (2.11) silently loses the gradient of an output that is a view.
        return rotated.to(x.dtype, copy=torch.compiler.is_compiling())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The rotation is invertible, so the output is saved, not x: attention saves it anyway.
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        output, scale, skew, basis, frequencies, phase = ctx.saved_tensors
        grad_x = grad_scale = grad_skew = None
        with torch.no_grad(), no_autocast(grad.device):
            cos, sin = (_by_block(t) for t in (phase.cos(), phase.sin()))
            after, grad_after = (_by_block(t.to(basis.dtype)) for t in (output, grad))
            before, grad_before = (rotate_planes(t, cos, -sin) for t in (after, grad_after))
            if ctx.needs_input_grad[0]:
                grad_x = (grad_before.flatten(2, 4) @ basis.mT).view_as(grad_before)
                grad_x = _by_token(grad_x).to(grad.dtype)
            if ctx.needs_input_grad[1]:
                torque = _torque(after, grad_after) * frequencies[:, :, None, None, None]
                grad_scale = _by_token(torque.sum(-1, keepdim=True))[..., 0]
                grad_scale = grad_scale.sum_to_size(scale.shape)
            if ctx.needs_input_grad[2]:
                by_block = _by_block(scale[..., None])
                sums = _sums_over_tokens(before, grad_before, after, grad_after, by_block)
                inner = skew_gradient(*sums, frequencies, _precision_of_sums(basis))
                grad_skew = small_product(small_product(basis, inner), basis.mT)
        grads = (grad_x, grad_scale, grad_skew)
        if torch.is_grad_enabled():
            grads = _NoSecondDerivative.apply(*grads, grad, scale, skew)
        return *grads, None, None, None


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on three gradients; its own derivative raises an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor | None) -> Any:
        return tuple(None if tensor is None else tensor.clone() for tensor in tensors[:3])

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


def _by_block(x: Tensor) -> Tensor:
    """(B, H, G, T, m, ...) to (H, m, B, G, T, ...): the tokens of a block are contiguous."""
    return x.permute(1, 4, 0, 2, 3, 5).contiguous()


def _by_token(x: Tensor) -> Tensor:
    return x.permute(2, 0, 3, 4, 1, 5)


def _torque(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of each plane's phase: grad . J x, (..., b) to (..., f)."""
    end = x.shape[-1] // 2 * 2
    return x[..., 0:end:2] * grad[..., 1:end:2] - x[..., 1:end:2] * grad[..., 0:end:2]


def _sums_over_tokens(
    before: Tensor, grad_before: Tensor, after: Tensor, grad_after: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sums that ``skew_gradient`` takes, from vectors (H, m, B, G, T, b)."""
    numerator = _outer(grad_before, before) - _outer(grad_after, after)
    limit = 0.5 * (_outer(scale * grad_before, before) + _outer(scale * grad_after, after))
    weight = grad_after.square().sum(-1, keepdim=True)
    cubes = weight * scale.abs() ** 3
    return numerator, limit, weight.sum((2, 3, 4, 5)), cubes.sum((2, 3, 4, 5))


def skew_gradient(
    numerator: Tensor, limit: Tensor, mass: Tensor, cubes: Tensor, frequencies: Tensor, eps: float
) -> Tensor:
    """Return the gradient of S in its eigenbasis (H, m, b, b), from sums over tokens.

    Args:
        numerator: sum g x^T before the rotation minus after it, (H, m, b, b), for vectors x and
            gradients g in the eigenbasis.
        limit: Half the sum of s g x^T before and after, (H, m, b, b).
        mass: sum |g|^2, (H, m).
        cubes: sum |g|^2 |s|^3, (H, m).
        frequencies: Of S, (H, m, f).
        eps: Relative precision of the sums.
    """
    size = limit.shape[-1]
    if size % 2:  # padding makes the unrotated coordinate a plane of frequency zero
        numerator, limit = (pad(t, (0, 1, 0, 1)) for t in (numerator, limit))
        frequencies = pad(frequencies, (0, 1))
    numerator = _multiply_rows_by_j(numerator)
    # One s for all tokens: the cubic mean of |s|, weighted by gradient. The largest |s| could be
    # that of a distant token without gradient (padding).
    reach = (cubes / torch.where(mass > 0, mass, 1.0)) ** (1 / 3)
    difference = frequencies[..., :, None] - frequencies[..., None, :]
    total = frequencies[..., :, None] + frequencies[..., None, :]
    gradient = _commuting_part(_divided(numerator, difference, limit, reach, eps))
    rest = _divided(numerator, total, limit, reach, eps)
    return (gradient + rest - _commuting_part(rest))[..., :size, :size]


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """Sum grad x^T over tokens: (H, m, B, G, T, b) twice to (H, m, b, b).

    First within samples, then over them: one product of 8 x 25,000 x 8 uses little of a GPU.
    """
    return (grad.flatten(3, 4).mT @ x.flatten(3, 4)).sum(2)


def _multiply_rows_by_j(matrix: Tensor) -> Tensor:
    """Return J X for every pair of rows: division by i, with the sign of the gradient."""
    first, second = matrix[..., 0::2, :], matrix[..., 1::2, :]
    return torch.stack((-second, first), dim=-2).flatten(-3, -2)


def _divided(numerator: Tensor, gap: Tensor, limit: Tensor, reach: Tensor, eps: float) -> Tensor:
    """Return numerator / gap, or its limit where the gap is too small for the quotient.

    With weights w of the tokens, the error of the limit is gap^2 sum w |s|^3 / 12 and that of the
    quotient eps sum w / gap. They are equal where (reach gap)^3 = 12 eps: there both are about
    1e-5 of the gradient in float32 and 1e-11 in float64.
    """
    gap = gap.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
    threshold = (12 * eps) ** (1 / 3)
    tiny = gap.abs() * reach[..., None, None] <= threshold
    return torch.where(tiny, limit, numerator / torch.where(tiny, 1.0, gap))


def _commuting_part(matrix: Tensor) -> Tensor:
    """Return (X + J X J^T) / 2 for every 2x2 block X: the part that commutes with J."""
    return 0.5 * (matrix + _multiply_rows_by_j(_multiply_rows_by_j(matrix.mT).mT))
