"""Rotation along one line of skew-symmetric matrices, R = exp(s S), with gradients that hold
everywhere.

In value this is the spectral rotation with the eigenbasis of S. Its gradient is not taken through
that eigenbasis, which is not smooth where frequencies repeat or vanish (S = 0 among them, where
fine-tuning starts), but from the derivative of the exponential itself (Daleckii and Krein):

    d exp(sS)[E] = V (Phi o (V* E V)) V*,  Phi_jk = s exp(is(w_j + w_k)/2) sinc(s(w_j - w_k)/2).

The exponential factor splits over j and k: it turns both vectors of a token by half their angle.
What is left, s sinc(s d/2) = (2/d) sin(s d/2), splits too, since sin(a - b) = sin a cos b - cos a
sin b. So the sum over tokens is three matrix products, and no matrix per token is ever formed.
Pairs of planes with nearly the same frequency take the limit d -> 0 instead of the quotient.

All of this is in real numbers: a real 2x2 block between planes j and k is the sum of a part that
commutes with J, which sees the difference of the two frequencies, and one that anticommutes with
it, which sees their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comrope.angles import Line, Torus, skew_spectrum
from comrope.ops.spectral import change_basis, phases, rotate_planes, rotate_torus
from comrope.precision import no_autocast

__all__ = ["rotate_line"]


def rotate_line(q: Tensor, k: Tensor, positions: Tensor, line: Line) -> tuple[Tensor, Tensor]:
    """Rotate blocks q (B, H, G, T, m, b) and k (B, H, 1, T, m, b) at positions (..., T, N)."""
    if line.skew.shape[-1] == 2:  # every 2x2 skew matrix is w J: nothing to decompose
        frequencies = line.direction[..., None] * line.skew[..., 1, :1]
        return rotate_torus(q, k, positions, Torus(None, frequencies, 2))
    basis, frequencies = skew_spectrum(line.skew.detach())
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
        return rotate_planes(wide, angle.cos(), angle.sin()).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The rotation inverts, so the output is all that is kept of x; attention keeps it as well.
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        output, scale, skew, basis, frequencies, angle = ctx.saved_tensors
        cos, sin = (0.5 * angle).cos(), (0.5 * angle).sin()
        with torch.no_grad(), no_autocast(grad.device):
            x_half = rotate_planes(output.to(basis.dtype), cos, -sin)
            grad_half = rotate_planes(grad.to(basis.dtype), cos, -sin)
            grad_x = change_basis(rotate_planes(grad_half, cos, -sin), basis.mT).to(grad.dtype)
            grad_scale = grad_skew = None
            if ctx.needs_input_grad[1]:
                torque = _torque(x_half, grad_half) * frequencies[:, None, None]
                grad_scale = torque.sum(-1).sum_to_size(scale.shape)
            if ctx.needs_input_grad[2]:
                inner = _skew_gradient(x_half, grad_half, cos, sin, scale, frequencies)
                grad_skew = basis @ inner @ basis.mT
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


def _torque(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of each plane's angle: grad . J x, (..., b) to (..., f)."""
    end = x.shape[-1] // 2 * 2
    return x[..., 0:end:2] * grad[..., 1:end:2] - x[..., 1:end:2] * grad[..., 0:end:2]


def _skew_gradient(
    x: Tensor, grad: Tensor, cos: Tensor, sin: Tensor, scale: Tensor, frequencies: Tensor
) -> Tensor:
    """The gradient of S in its eigenbasis (H, m, b, b), from vectors turned half-way."""
    size = x.shape[-1]
    if size % 2:  # a phantom partner makes the unrotated coordinate a plane of frequency zero
        x, grad = (torch.nn.functional.pad(t, (0, 1)) for t in (x, grad))
        cos = torch.nn.functional.pad(cos, (0, 1), value=1.0)
        sin, frequencies = (torch.nn.functional.pad(t, (0, 1)) for t in (sin, frequencies))
    cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
    sin_cos = _sum_over_tokens(grad * sin, x * cos)
    cos_sin = _sum_over_tokens(grad * cos, x * sin)
    limit = _sum_over_tokens(grad * scale[..., None], x)

    reach = scale.abs().amax(dim=(0, 2, 3)) if scale.numel() else limit.new_zeros(limit.shape[:2])
    minus = frequencies[..., :, None] - frequencies[..., None, :]
    plus = frequencies[..., :, None] + frequencies[..., None, :]
    commuting = _divided(2 * (sin_cos - cos_sin), minus, limit, reach)
    anticommuting = _divided(2 * (sin_cos + cos_sin), plus, limit, reach)
    return (_commuting_part(commuting) + anticommuting - _commuting_part(anticommuting))[
        ..., :size, :size
    ]


def _sum_over_tokens(grad: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhgtmi,bhgtmj->hmij", grad, x)


def _divided(numerator: Tensor, gap: Tensor, limit: Tensor, reach: Tensor) -> Tensor:
    """numerator / gap, or its limit where the gap is too small for the quotient.

    The limit is wrong by (reach gap)^2 / 24, the quotient by eps / (reach gap): they meet where
    the cube is 24 eps, and there both are below 1e-5 in float32 and 1e-10 in float64.
    """
    gap = gap.repeat_interleave(2, dim=-2).repeat_interleave(2, dim=-1)
    threshold = (24 * torch.finfo(gap.dtype).eps) ** (1 / 3)
    tiny = gap.abs() * reach[..., None, None] <= threshold
    return torch.where(tiny, limit, numerator / torch.where(tiny, 1.0, gap))


def _commuting_part(matrix: Tensor) -> Tensor:
    """(X - J X J) / 2 for every 2x2 block X: the part that commutes with J."""
    blocks = matrix.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))  # (..., f, 2, f, 2)
    sign = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).to(blocks)[:, None, :]
    twin = blocks.flip(-3).flip(-1) * sign
    return (0.5 * (blocks + twin)).flatten(-2).flatten(-3, -2)
