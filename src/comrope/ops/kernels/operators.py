"""The rotation as operators of torch: seen through by the compiler, with every gradient.

``comrope::rotate`` takes q and k; ``comrope::rotate_packed`` takes them out of one tensor with v
beside them, as a projection leaves them, and gives its gradient back in one tensor, so that no copy
puts the three together again. Nothing is kept for the way back but the results, which
attention keeps as well. ``comrope::rotate_packed_`` turns them where they lie, without gradient.

The angles come as a torus (frequencies, basis) or as a line (skew, direction, with the spectrum of
skew): see comrope/angles.py. Shapes as in launch.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comrope._dtypes import no_autocast
from comrope.angles import Angles, CollinearAngles, CommutingAngles, GeneralAngles
from comrope.ops.kernels.apply_rotation import rotate_free
from comrope.ops.kernels.launch import (
    Heads,
    RotationArgs,
    empty_angle_gradients,
    empty_like_order,
    launch_backward,
    launch_forward,
)
from comrope.ops.layout import at_every_token, unpack

__all__ = [
    "prepare",
    "rotate",
    "rotate_on_gpu",
    "rotate_packed",
    "rotate_packed_",
    "rotate_packed_on_gpu",
]


def _rotate(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, basis: Tensor | None,
    skew: Tensor | None, direction: Tensor | None, planes: Tensor | None,
    block_size: int, prefix: int, halves: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, H G, T, D), k (B, H, T, D) rotated, in tensors of their own.

    For a torus ``frequencies`` (N, H, m, f) and ``basis`` (H, m, b, b) have gradients. For a line
    ``skew`` (H, m, b, b) and ``direction`` (N, H, m) have; ``basis`` and ``planes`` (H, m, f) are
    the spectrum of ``skew``, and ``frequencies`` is direction times planes.
    """
    out = Heads(empty_like_order(q), empty_like_order(k))
    with torch.cuda.device_of(q):
        launch_forward(
            Heads(q, k),
            RotationArgs(positions, frequencies, basis, block_size, prefix, halves),
            out,
        )
    return out.q, out.k


rotate = torch.library.custom_op("comrope::rotate", mutates_args=())(_rotate)


@rotate.register_fake
def _(q, k, *_):
    return empty_like_order(q), empty_like_order(k)


def _rotate_backward(
    q: Tensor, k: Tensor, q_grad: Tensor, k_grad: Tensor, positions: Tensor, frequencies: Tensor,
    basis: Tensor | None, direction: Tensor | None, planes: Tensor | None, block_size: int,
    prefix: int, halves: bool, wants_angles: bool, wants_positions: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """From rotated q and k and their gradients: those before, of the angles (see
    ``launch.empty_angle_gradients``), of the position of every row.
    """
    out = Heads(empty_like_order(q), empty_like_order(k))
    with torch.cuda.device_of(q):
        rest = launch_backward(
            Heads(q, k), Heads(q_grad, k_grad),
            RotationArgs(positions, frequencies, basis, block_size, prefix, halves), out,
            direction=direction, planes=planes, wants_angles=wants_angles,
            wants_positions=wants_positions,
        )  # fmt: skip
    return out.q, out.k, *rest


rotate_backward = torch.library.custom_op("comrope::rotate_backward", mutates_args=())(
    _rotate_backward
)


@rotate_backward.register_fake
def _(q, k, q_grad, k_grad, *rest):
    return empty_like_order(q), empty_like_order(k), *_fake_gradients(k, *rest)


def _rotate_packed(
    qkv: Tensor, positions: Tensor, frequencies: Tensor, basis: Tensor | None,
    skew: Tensor | None, direction: Tensor | None, planes: Tensor | None,
    block_size: int, prefix: int, halves: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """qkv (B, T, H (G + 2), D) to rotated q, rotated k and v, in tensors of their own."""
    heads = Heads(*unpack(qkv, frequencies.shape[1]))
    out = Heads(*map(empty_like_order, heads))
    with torch.cuda.device_of(qkv):
        launch_forward(
            heads, RotationArgs(positions, frequencies, basis, block_size, prefix, halves), out
        )
    return out


rotate_packed = torch.library.custom_op("comrope::rotate_packed", mutates_args=())(_rotate_packed)


@rotate_packed.register_fake
def _(qkv, positions, frequencies, *_):
    return tuple(map(empty_like_order, unpack(qkv, frequencies.shape[1])))


def _rotate_packed_backward(
    q: Tensor, k: Tensor, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, positions: Tensor,
    frequencies: Tensor, basis: Tensor | None, direction: Tensor | None, planes: Tensor | None,
    block_size: int, prefix: int, halves: bool, wants_angles: bool, wants_positions: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``rotate_backward``, with the three gradients packed (B, T, H (G + 2), D)."""
    packed = _empty_packed(q, k)
    with torch.cuda.device_of(q):
        rest = launch_backward(
            Heads(q, k), Heads(q_grad, k_grad, v_grad),
            RotationArgs(positions, frequencies, basis, block_size, prefix, halves),
            Heads(*unpack(packed, k.shape[1])),
            direction=direction, planes=planes, wants_angles=wants_angles,
            wants_positions=wants_positions,
        )  # fmt: skip
    return packed, *rest


rotate_packed_backward = torch.library.custom_op(
    "comrope::rotate_packed_backward", mutates_args=()
)(_rotate_packed_backward)


@rotate_packed_backward.register_fake
def _(q, k, q_grad, k_grad, v_grad, *rest):
    return _empty_packed(q, k), *_fake_gradients(k, *rest)


def _rotate_packed_(
    qkv: Tensor, positions: Tensor, frequencies: Tensor, basis: Tensor | None,
    block_size: int, prefix: int, halves: bool,
) -> None:  # fmt: skip
    """The q and k of qkv (B, T, H (G + 2), D) rotated where they lie."""
    heads = Heads(*unpack(qkv, frequencies.shape[1])[:2])
    with torch.cuda.device_of(qkv):
        launch_forward(
            heads, RotationArgs(positions, frequencies, basis, block_size, prefix, halves), heads
        )


rotate_packed_ = torch.library.custom_op("comrope::rotate_packed_", mutates_args=("qkv",))(
    _rotate_packed_
)


def _empty_packed(q: Tensor, k: Tensor) -> Tensor:
    batch, heads, tokens, dim = q.shape
    return q.new_empty(batch, tokens, heads + 2 * k.shape[1], dim)


def _fake_gradients(
    k, positions, frequencies, basis, direction, planes, block_size, prefix, halves, wants_angles,
    wants_positions,
):  # fmt: skip
    args = RotationArgs(positions, frequencies, basis, block_size, prefix, halves)
    rows = (k.shape[0] * k.shape[2], frequencies.shape[0]) if wants_positions else 0
    angles = empty_angle_gradients(args, direction is not None, wants_angles)
    return *angles, frequencies.new_empty(rows)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any, first: int) -> None:
    """``first`` is where the positions come among the inputs, after q and k or qkv."""
    *tensors, ctx.block_size, ctx.prefix, ctx.halves = inputs[first:]
    ctx.save_for_backward(output[0], output[1], *tensors)
    ctx.wants = ctx.needs_input_grad[first : first + len(tensors)]


def _gradients(
    ctx: Any, saved: tuple[Tensor, ...], first: Tensor, second: Tensor, pulls: Tensor
) -> tuple[Tensor | None, ...]:
    """Of positions, frequencies, basis, skew, direction and planes."""
    k, positions, is_line = saved[1], saved[2], saved[6] is not None
    of_positions = None
    if ctx.wants[0]:
        of_positions = _fit(pulls.view(k.shape[0], k.shape[2], positions.shape[-1]), positions)
    found = (None, None, second, first) if is_line else (first, second, None, None)
    wanted = (x if wants else None for x, wants in zip(found, ctx.wants[1:5], strict=True))
    return of_positions, *wanted, None


def _fit(pulls: Tensor, positions: Tensor) -> Tensor:
    """(B, T, N) to the shape of the positions: without prefix tokens, shared or per sample."""
    pulls = pulls[:, pulls.shape[1] - positions.shape[-2] :]
    return pulls.sum_to_size(positions.shape) if positions.ndim == 3 else pulls.sum(0)


def _options(ctx: Any) -> tuple[Any, ...]:
    return ctx.block_size, ctx.prefix, ctx.halves, any(ctx.wants[1:]), ctx.wants[0]


def _rotate_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep(ctx, inputs, output, 2)


def _rotate_autograd(ctx: Any, q_grad: Tensor, k_grad: Tensor, back: Any = rotate_backward) -> Any:
    saved = ctx.saved_tensors  # once: checkpointing recomputes them when they are asked for
    q, k, positions, frequencies, basis, _, direction, planes = saved
    of_q, of_k, *rest = back(
        q, k, q_grad, k_grad, positions, frequencies, basis, direction, planes, *_options(ctx)
    )
    return of_q, of_k, *_gradients(ctx, saved, *rest), None, None, None


def _packed_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep(ctx, inputs, output, 1)


def _packed_autograd(
    ctx: Any, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, back: Any = rotate_packed_backward
) -> Any:
    saved = ctx.saved_tensors
    q, k, positions, frequencies, basis, _, direction, planes = saved
    of_qkv, *rest = back(
        q, k, q_grad, k_grad, v_grad, positions, frequencies, basis, direction, planes,
        *_options(ctx),
    )  # fmt: skip
    return of_qkv, *_gradients(ctx, saved, *rest), None, None, None


rotate.register_autograd(_rotate_autograd, setup_context=_rotate_context)
rotate_packed.register_autograd(_packed_autograd, setup_context=_packed_context)


class RotateEagerly(torch.autograd.Function):
    """``rotate`` for plain tensors outside of a graph: an operator takes the CPU longer to call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _rotate(*inputs)
        _rotate_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> Any:
        back = rotate_backward if _batched(q_grad, k_grad) else _rotate_backward
        return _rotate_autograd(ctx, q_grad, k_grad, back)


class RotatePackedEagerly(torch.autograd.Function):
    """``rotate_packed`` in the same way."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _rotate_packed(*inputs)
        _packed_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> Any:
        many = _batched(q_grad, k_grad, v_grad)
        back = rotate_packed_backward if many else _rotate_packed_backward
        return _packed_autograd(ctx, q_grad, k_grad, v_grad, back)


def seen(*tensors: Any) -> bool:
    """Whether anybody looks on who needs operators: a compiler, a mode, another kind of tensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    plain = (Tensor, torch.nn.Parameter)
    return any(isinstance(x, Tensor) and type(x) not in plain for x in tensors)


def _batched(*grads: Tensor) -> bool:
    """Whether gradients come many at a time (``is_grads_batched``), which operators can take."""
    try:
        for grad in grads:
            grad.untyped_storage()
    except NotImplementedError:  # many in one have none of their own
        return True
    return False


def rotate_on_gpu(
    q: Tensor, k: Tensor, positions: Tensor, angles: Angles, prefix: int, halves: bool
) -> tuple[Tensor, Tensor]:
    """As ``comrope.ops.rotate``."""
    with no_autocast(q.device):
        if isinstance(angles, GeneralAngles):
            return _rotate_free(q, k, positions, angles, prefix)
        prepared = prepare(positions, angles)
        run = rotate if seen(q, k, *prepared) else RotateEagerly.apply
        return run(q, k, *prepared, prefix, halves)


def rotate_packed_on_gpu(
    qkv: Tensor,
    key_heads: int,
    positions: Tensor,
    angles: Angles,
    prefix: int,
    halves: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``comrope.ops.rotate_packed``."""
    with no_autocast(qkv.device):
        if isinstance(angles, GeneralAngles):
            q, k, v = unpack(qkv, key_heads)
            return *_rotate_free(q, k, positions, angles, prefix), v
        prepared = prepare(positions, angles)
        wanted = (qkv, *(part for part in prepared if isinstance(part, Tensor)))
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanted)
        if learns or not in_place:
            eagerly = not seen(qkv, *prepared)
            run = RotatePackedEagerly.apply if eagerly else rotate_packed
            return run(qkv, *prepared, prefix, halves)
        if qkv.stride(-1) != 1 or _overlaps(qkv):
            qkv = qkv.contiguous()
        positions, frequencies, basis, _, _, _, size = prepared
        rotate_packed_(qkv, positions, frequencies, basis, size, prefix, halves)
        return unpack(qkv, key_heads)


def _overlaps(x: Tensor) -> bool:
    """Whether numbers may share their places in memory: in place they would be turned twice."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach = stride * size if size > 1 else reach
    return False


def prepare(positions: Tensor, angles: CommutingAngles | CollinearAngles) -> tuple[Any, ...]:
    """Positions, frequencies, basis, skew, direction, planes and block size, as the operators ask.

    Without a basis the blocks are mere groups of planes, and are taken apart where they can be.
    """
    positions = positions.float().contiguous()
    if isinstance(angles, CollinearAngles) and angles.skew.shape[-1] == 2:
        angles = angles.as_commuting()
    if isinstance(angles, CollinearAngles):
        cached = angles.cache_spectrum().cached_spectrum
        basis, planes = (part.float().contiguous() for part in cached)  # type: ignore[union-attr]
        skew, direction = angles.skew.float(), angles.direction.float().contiguous()
        frequencies = direction.detach()[..., None] * planes
        return positions, frequencies, basis, skew, direction, planes, skew.shape[-1]
    frequencies, size = angles.frequencies.float(), angles.block_size
    if angles.basis is None and size % 2 == 0:
        frequencies, size = frequencies.flatten(2)[..., None], 2
    basis = None if angles.basis is None else angles.basis.float().contiguous()
    return positions, frequencies.contiguous(), basis, None, None, None, size


def _rotate_free(
    q: Tensor, k: Tensor, positions: Tensor, angles: GeneralAngles, prefix: int
) -> tuple[Tensor, Tensor]:
    positions = at_every_token(positions.float(), q.shape[2], prefix)
    return rotate_free(q, k, positions, angles.skew.float())
