"""Rotation along one line of skew-symmetric matrices, R = exp(s S), with gradients that hold
everywhere.

In value this is the spectral rotation with the eigenbasis of S. Its gradient is not taken through
that eigenbasis, which is not smooth where frequencies repeat or vanish (S = 0 among them, where
fine-tuning starts), but from the derivative of the exponential itself (Daleckii and Krein):

    d exp(sS)[E] = V (Phi o (V* E V)) V*,  Phi_jk = (exp(isw_j) - exp(isw_k)) / (i(w_j - w_k)).

Summed over tokens, the numerator is the outer product of gradient and vector before the rotation
minus that after it: two matrix products, and no matrix per token is ever formed. Where two
frequencies are too close for the quotient, its limit is the mean of the two, weighted by s.

All of this is in real numbers: a real 2x2 block between planes j and k is the sum of a part that
commutes with J, which sees the difference of the two frequencies, and one that anticommutes with
it, which sees their sum.

Shapes: B batch, H key heads, G queries a key head, T tokens, m blocks a head, b block size,
f = b // 2 planes a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from comrope._dtypes import no_autocast, tf32_allowed
from comrope.angles import Line, skew_spectrum
from comrope.ops.spectral import (
    change_basis,
    phases,
    rotate_planes,
    rotate_torus,
    small_product,
)

__all__ = ["rotate_line", "skew_gradient"]


def rotate_line(q: Tensor, k: Tensor, positions: Tensor, line: Line) -> tuple[Tensor, Tensor]:
    """Rotate blocks q (B, H, G, T, m, b) and k (B, H, 1, T, m, b) at positions (..., T, N)."""
    if line.skew.shape[-1] == 2:
        return rotate_torus(q, k, positions, line.plane())
    basis, frequencies = line.known or skew_spectrum(line.skew.detach())
    scale = phases(positions, line.direction[..., None])[..., 0]  # (1 or B, H, 1, T, m)
    with torch.no_grad():  # from positions and frequencies at once: one rounding less than via s
        angle = phases(positions, line.direction[..., None] * frequencies)
    return (
        _RotateAlongLine.apply(q, scale, line.skew, basis, frequencies, angle),
        _RotateAlongLine.apply(k, scale, line.skew, basis, frequencies, angle),
    )


class _RotateAlongLine(torch.autograd.Function):
    """x (B, H, G, T, m, b) to Q^T exp(s S) x, with Q held constant: it cancels in the scores.

    Differentiable in x, s and S; Q, the frequencies w of S and the angles s w belong to S.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, skew: Tensor, basis: Tensor, frequencies: Tensor, angle: Tensor
    ) -> Any:
        wide = change_basis(x.to(basis.dtype), basis)
        rotated = rotate_planes(wide, angle.cos(), angle.sin())
        # Of an output that is a view, torch.compile (2.11) silently loses the gradient.
        return rotated.to(x.dtype, copy=torch.compiler.is_compiling())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The rotation inverts, so the output is all that is kept of x; attention keeps it as well.
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        output, scale, skew, basis, frequencies, angle = ctx.saved_tensors
        grad_x = grad_scale = grad_skew = None
        with torch.no_grad(), no_autocast(grad.device):
            cos, sin = (_by_block(t) for t in (angle.cos(), angle.sin()))
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
                inner = skew_gradient(*sums, frequencies, _noise_of_sums(basis))
                grad_skew = small_product(small_product(basis, inner), basis.mT)
        grads = (grad_x, grad_scale, grad_skew)
        if torch.is_grad_enabled():
            grads = _NoSecondDerivative.apply(*grads, grad, scale, skew)
        return *grads, None, None, None


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on three gradients, which says clearly that they are the end of the line."""

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
            "comrope: the spectral backend has no second derivative for 'comrope-ap', "
            "'comrope-ld' and one-axis 'liere'; use backend='reference', which has"
        )


def _noise_of_sums(like: Tensor) -> float:
    """What the sums over tokens are good to: those are matrix products, and a GPU may have been
    allowed to run them in TF32.
    """
    in_tf32 = like.dtype == torch.float32 and like.device.type == "cuda" and tf32_allowed()
    return 5e-4 if in_tf32 else torch.finfo(like.dtype).eps


def _by_block(x: Tensor) -> Tensor:
    """(B, H, G, T, m, ...) to (H, m, B, G, T, ...): the tokens of a block lie together."""
    return x.permute(1, 4, 0, 2, 3, 5).contiguous()


def _by_token(x: Tensor) -> Tensor:
    return x.permute(2, 0, 3, 4, 1, 5)


def _torque(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of each plane's angle: grad . J x, (..., b) to (..., f)."""
    end = x.shape[-1] // 2 * 2
    return x[..., 0:end:2] * grad[..., 1:end:2] - x[..., 1:end:2] * grad[..., 0:end:2]


def _sums_over_tokens(
    before: Tensor, grad_before: Tensor, after: Tensor, grad_after: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``skew_gradient`` needs, from vectors (H, m, B, G, T, b)."""
    numerator = _outer(grad_before, before) - _outer(grad_after, after)
    limit = 0.5 * (_outer(scale * grad_before, before) + _outer(scale * grad_after, after))
    weight = grad_after.square().sum(-1, keepdim=True)
    cubes = weight * scale.abs() ** 3
    return numerator, limit, weight.sum((2, 3, 4, 5)), cubes.sum((2, 3, 4, 5))


def skew_gradient(
    numerator: Tensor, limit: Tensor, mass: Tensor, cubes: Tensor, frequencies: Tensor, eps: float
) -> Tensor:
    """The gradient of S in its eigenbasis (H, m, b, b), from sums over tokens.

    With vectors x and gradients g, before the rotation and after it, in the eigenbasis:
    ``numerator`` sum g x^T before less after (H, m, b, b), ``limit`` half the sum of s g x^T before
    and after, ``mass`` sum |g|^2 (H, m), ``cubes`` sum |g|^2 |s|^3. ``eps`` is what the sums are
    good to.
    """
    size = limit.shape[-1]
    if size % 2:  # a phantom partner makes the unrotated coordinate a plane of frequency zero
        numerator, limit = (pad(t, (0, 1, 0, 1)) for t in (numerator, limit))
        frequencies = pad(frequencies, (0, 1))
    numerator = _turn_rows(numerator)
    # The s that stands for all tokens: the cubic mean of |s|, weighted by gradient. Not the largest
    # |s|: a token far out that nobody looks at (padding) must not decide for the rest.
    reach = (cubes / torch.where(mass > 0, mass, 1.0)) ** (1 / 3)
    difference = frequencies[..., :, None] - frequencies[..., None, :]
    total = frequencies[..., :, None] + frequencies[..., None, :]
    gradient = _commuting_part(_divided(numerator, difference, limit, reach, eps))
    rest = _divided(numerator, total, limit, reach, eps)
    return (gradient + rest - _commuting_part(rest))[..., :size, :size]


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """Sum over tokens of grad x^T: (H, m, B, G, T, b) twice to (H, m, b, b).

    Sample by sample and then over samples: one product of 8 x 25,000 x 8 leaves a GPU idle.
    """
    return (grad.flatten(3, 4).mT @ x.flatten(3, 4)).sum(2)


def _turn_rows(matrix: Tensor) -> Tensor:
    """J X for every pair of rows: division by i, with the sign of the gradient."""
    first, second = matrix[..., 0::2, :], matrix[..., 1::2, :]
    return torch.stack((-second, first), dim=-2).flatten(-3, -2)


def _divided(numerator: Tensor, gap: Tensor, limit: Tensor, reach: Tensor, eps: float) -> Tensor:
    """numerator / gap, or its limit where the gap is too small for the quotient.

    With weights w of the tokens, the limit is wrong by gap^2 sum w |s|^3 / 12 and the quotient by
    eps sum w / gap. They meet where (reach gap)^3 = 12 eps, and there both are about 1e-5 of the
    gradient in float32 and 1e-11 in float64.
    """
    gap = gap.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
    threshold = (12 * eps) ** (1 / 3)
    tiny = gap.abs() * reach[..., None, None] <= threshold
    return torch.where(tiny, limit, numerator / torch.where(tiny, 1.0, gap))


def _commuting_part(matrix: Tensor) -> Tensor:
    """(X + J X J^T) / 2 for every 2x2 block X: the part that commutes with J."""
    return 0.5 * (matrix + _turn_rows(_turn_rows(matrix.mT).mT))
