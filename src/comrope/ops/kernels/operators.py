"""The rotation of q and k as operators of torch, for eager execution, autograd and torch.compile.

``comrope::rotate`` takes q and k apart. ``comrope::rotate_packed`` takes them as parts of one
tensor with v, as a qkv projection returns them, and returns its gradient in one tensor, so that
nothing is copied to join the three. Only the rotated q and k are saved for the backward pass, which
attention saves as well. ``comrope::rotate_packed_`` rotates q and k in place, without gradient.

All take the angles as ``prepare`` returns them: commuting angles as frequencies (N, H, m, f) and
basis (H, m, b, b), collinear angles (comrope/angles.py) as skew (H, m, b, b) and direction
(N, H, m), with the spectrum of skew as basis and planes (H, m, f), and frequencies = direction
times planes. Shapes as in launch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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

_ROTATION = (
    "Tensor positions, Tensor frequencies, Tensor? basis, Tensor? skew, Tensor? direction, "
    "Tensor? planes, SymInt block_size, SymInt prefix, bool halves"
)
_ROTATION_BACKWARD = (
    "Tensor positions, Tensor frequencies, Tensor? basis, Tensor? direction, Tensor? planes, "
    "SymInt block_size, SymInt prefix, bool halves, bool wants_angles, bool wants_positions"
)


class Operator(NamedTuple):
    """A differentiable rotation, for two kinds of callers."""

    traceable: Any  # an operator of torch, which compilers and tracers see
    eager: Any  # an autograd function, which takes the CPU less time to call


def make_operator(
    name: str,
    inputs: str,
    outputs: str,
    unpack_inputs: Callable[..., Heads],
    empty_gradients: Callable[[Tensor, Tensor], tuple[tuple[Tensor, ...], Heads]],
) -> Operator:
    """Register ``comrope::NAME`` and ``comrope::NAME_backward``.

    Args:
        name: Name of the operator.
        inputs: Its tensors before those of the rotation, separated by commas.
        outputs: Its rotated tensors in the same way. The first two are q and k.
        unpack_inputs: From the number of key heads and the inputs to q, k and v.
        empty_gradients: From rotated q and k to the uninitialised gradients of the inputs, and the
            same memory as q, k and v.
    """
    count = inputs.count(",") + 1

    def forward(*given: Any, launch: bool = True) -> tuple[Tensor, ...]:
        positions, frequencies, basis, _, _, _, *options = given[count:]
        heads = unpack_inputs(frequencies.shape[1], *given[:count])
        out = Heads(*(x if x is None else empty_like_order(x) for x in heads))
        if launch:
            with torch.cuda.device_of(heads.q):
                launch_forward(heads, RotationArgs(positions, frequencies, basis, *options), out)
        return tuple(x for x in out if x is not None)

    def backward(q: Tensor, k: Tensor, *given: Any, launch: bool = True) -> tuple[Tensor, ...]:
        *grads, positions, frequencies, basis, direction, planes = given[:-5]
        *options, wants_angles, wants_positions = given[-5:]
        args = RotationArgs(positions, frequencies, basis, *options)
        gradients, out = empty_gradients(q, k)
        if launch:
            with torch.cuda.device_of(q):
                of_rotation = launch_backward(
                    Heads(q, k), Heads(*grads), args, out, direction=direction, planes=planes,
                    wants_angles=wants_angles, wants_positions=wants_positions,
                )  # fmt: skip
            return *gradients, *of_rotation
        rows = (k.shape[0] * k.shape[2], frequencies.shape[0]) if wants_positions else 0
        of_angles = empty_angle_gradients(args, direction is not None, wants_angles)
        return *gradients, *of_angles, frequencies.new_empty(rows)

    rotated = ", ".join("Tensor" for _ in outputs.split(","))
    grads = ", ".join(f"Tensor {x.strip()}_grad" for x in outputs.split(","))
    results = ", ".join(["Tensor"] * (count + 3))
    tensors = ", ".join(f"Tensor {x.strip()}" for x in inputs.split(","))
    operator = torch.library.custom_op(
        f"comrope::{name}", forward, mutates_args=(),
        schema=f"({tensors}, {_ROTATION}) -> ({rotated})",
    )  # fmt: skip
    backward_operator = torch.library.custom_op(
        f"comrope::{name}_backward", backward, mutates_args=(),
        schema=f"(Tensor q, Tensor k, {grads}, {_ROTATION_BACKWARD}) -> ({results})",
    )  # fmt: skip
    operator.register_fake(lambda *given: forward(*given, launch=False))
    backward_operator.register_fake(lambda *given: backward(*given, launch=False))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, ctx.options = inputs[count:-3], inputs[-3:]
        ctx.save_for_backward(*output[:2], *tensors)
        ctx.wants = ctx.needs_input_grad[count : count + len(tensors)]

    def differentiate(
        ctx: Any, *grads: Tensor, backward: Callable[..., Any] = backward_operator
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at every access
        q, k, positions, frequencies, basis, skew, direction, planes = saved
        wants_positions, *wants_angles, _ = ctx.wants
        *of_inputs, first, second, of_rows = backward(
            q, k, *grads, positions, frequencies, basis, direction, planes,
            *ctx.options, any(wants_angles), wants_positions,
        )  # fmt: skip
        of_positions = None
        if wants_positions:
            of_tokens = of_rows.view(k.shape[0], k.shape[2], positions.shape[-1])
            of_positions = _sum_to_positions(of_tokens, positions)
        of_angles = (first, second, None, None) if skew is None else (None, None, second, first)
        wanted = (x if wants else None for x, wants in zip(of_angles, wants_angles, strict=True))
        return *of_inputs, of_positions, *wanted, None, None, None, None

    operator.register_autograd(differentiate, setup_context=save)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            output = forward(*given)
            save(ctx, given, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Any:
            many = _is_batched(grads)
            return differentiate(ctx, *grads, backward=backward_operator if many else backward)

    return Operator(operator, Eager.apply)


def _sum_to_positions(of_tokens: Tensor, positions: Tensor) -> Tensor:
    """Sum (B, T, N) to the shape of the positions: without prefix tokens, shared or per sample."""
    of_tokens = of_tokens[:, of_tokens.shape[1] - positions.shape[-2] :]
    return of_tokens.sum_to_size(positions.shape) if positions.ndim == 3 else of_tokens.sum(0)


def _is_batched(grads: tuple[Tensor, ...]) -> bool:
    """Return whether these are many gradients at once (``is_grads_batched``): operators only."""
    try:
        for grad in grads:
            grad.untyped_storage()
    except NotImplementedError:  # batched tensors have none of their own
        return True
    return False


def _empty_pair(q: Tensor, k: Tensor) -> tuple[tuple[Tensor, ...], Heads]:
    heads = Heads(empty_like_order(q), empty_like_order(k))
    return (heads.q, heads.k), heads


def _empty_packed(q: Tensor, k: Tensor) -> tuple[tuple[Tensor, ...], Heads]:
    batch, heads, tokens, dim = q.shape
    packed = q.new_empty(batch, tokens, heads + 2 * k.shape[1], dim)
    return (packed,), Heads(*unpack(packed, k.shape[1]))


rotate, _rotate_eager = make_operator(
    "rotate", "q, k", "q, k", lambda _, q, k: Heads(q, k), _empty_pair
)
# qkv is (B, T, H (G + 2), D).
rotate_packed, _rotate_packed_eager = make_operator(
    "rotate_packed", "qkv", "q, k, v", lambda heads, qkv: Heads(*unpack(qkv, heads)), _empty_packed
)


@torch.library.custom_op("comrope::rotate_packed_", mutates_args=("qkv",))
def rotate_packed_(
    qkv: Tensor, positions: Tensor, frequencies: Tensor, basis: Tensor | None,
    block_size: int, prefix: int, halves: bool,
) -> None:  # fmt: skip
    """Rotate the q and k of qkv (B, T, H (G + 2), D) in place."""
    heads = Heads(*unpack(qkv, frequencies.shape[1])[:2])
    args = RotationArgs(positions, frequencies, basis, block_size, prefix, halves)
    with torch.cuda.device_of(qkv):
        launch_forward(heads, args, heads)


def rotate_on_gpu(
    q: Tensor, k: Tensor, positions: Tensor, angles: Angles, prefix: int, halves: bool
) -> tuple[Tensor, Tensor]:
    """Rotate as ``comrope.ops.rotate`` does."""
    with no_autocast(q.device):
        if isinstance(angles, GeneralAngles):
            return _rotate_general(q, k, positions, angles, prefix)
        prepared = prepare(positions, angles)
        run = rotate if _needs_operator(q, k, *prepared) else _rotate_eager
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
    """Rotate as ``comrope.ops.rotate_packed`` does."""
    with no_autocast(qkv.device):
        if isinstance(angles, GeneralAngles):
            q, k, v = unpack(qkv, key_heads)
            return *_rotate_general(q, k, positions, angles, prefix), v
        prepared = prepare(positions, angles)
        tensors = (qkv, *(part for part in prepared if isinstance(part, Tensor)))
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if learns or not in_place:
            run = rotate_packed if _needs_operator(qkv, *prepared) else _rotate_packed_eager
            return run(qkv, *prepared, prefix, halves)
        if qkv.stride(-1) != 1 or _overlaps(qkv):
            qkv = qkv.contiguous()
        positions, frequencies, basis, _, _, _, size = prepared
        rotate_packed_(qkv, positions, frequencies, basis, size, prefix, halves)
        return unpack(qkv, key_heads)


def prepare(positions: Tensor, angles: CommutingAngles | CollinearAngles) -> tuple[Any, ...]:
    """Return positions, frequencies, basis, skew, direction, planes and block size.

    Without a basis, blocks are mere groups of planes; those of even size become blocks of size 2.
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


def _needs_operator(*tensors: Any) -> bool:
    """Return whether the call is observed: by a compiler, a mode, or another type of tensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    plain = (Tensor, torch.nn.Parameter)
    return any(isinstance(x, Tensor) and type(x) not in plain for x in tensors)


def _overlaps(x: Tensor) -> bool:
    """Return whether elements may share memory: in place they would be rotated twice."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach = stride * size if size > 1 else reach
    return False


def _rotate_general(
    q: Tensor, k: Tensor, positions: Tensor, angles: GeneralAngles, prefix: int
) -> tuple[Tensor, Tensor]:
    positions = at_every_token(positions.float(), q.shape[2], prefix)
    return rotate_free(q, k, positions, angles.skew.float())
