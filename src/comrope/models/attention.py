"""Self-attention that turns its queries and keys, and the transformer block around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

from comrope import ops
from comrope.angles import Angles, CommutingAngles
from comrope.rotary import RotaryEmbedding

__all__ = ["Attention", "Block"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Project = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Multi-head self-attention; ``rope`` None is attention without positions.

    With ``rotate_values`` the values are turned as well, and their sums turned back: a query that
    looks at several places learns from where it has what, and not only how much of it. (Whatever
    fetches the parameters of ``rope`` for its call alone has to leave them there until then.)
    """

    rotate_values = False  # of layers that were made before there was such a thing

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rope: RotaryEmbedding | None = None,
        rotate_values: bool = False,
    ) -> None:
        super().__init__()
        if rotate_values and rope is None:
            raise ValueError("rotate_values: expected False without a rope, got True")
        self.rotate_values = rotate_values
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.rope = rope
        self.proj = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        angles: Angles | None = None,
        *,
        attend: Attend = nn.functional.scaled_dot_product_attention,
    ) -> Tensor:
        """x (B, T, C) at positions (T, N) or (B, T, N); ``angles`` if known, those of ``rope``.

        ``attend`` is what is done with the rotated q and k, and v, (B, heads, T, D) each.
        """
        of_values = self.rope if self.rotate_values else None
        if angles is None and isinstance(self.rope, RotaryEmbedding) and not _hooked(self.rope):
            angles = self.rope.angles()
            if of_values is not None:  # once, for what is turned and turned back
                angles = angles.cache_spectrum()
        enter, leave, angles = self._projections(x, positions, angles)
        qkv = enter(x).unflatten(-1, (3 * self.num_heads, -1))
        if self.rope is None or _hooked(self.rope):
            q, k, v = (part.transpose(1, 2) for part in qkv.chunk(3, dim=2))
            if self.rope is not None:  # called, so that its hooks are
                q, k = self.rope(q, k, positions, angles=angles)
        else:
            inplace = not self.qkv._forward_hooks  # who looks at the projection may have kept it
            q, k, v = self.rope.rotate_qkv(qkv, positions, angles=angles, inplace=inplace)
        if of_values is None:
            mixed = attend(q, k, v)
        else:
            mixed = attend(q, k, of_values.rotate(v, positions, angles=angles))
            if isinstance(of_values, RotaryEmbedding) and _is_plain(self.proj):
                own = self.proj.weight
                mixed, weight = of_values._inverse_with_projection(
                    mixed, positions, own, angles=angles
                )
                if weight is not own:  # it has taken a basis
                    leave = _linear(weight, self.proj.bias)
            else:
                mixed = of_values.rotate(mixed, positions, inverse=True, angles=angles)
        return leave(mixed.transpose(1, 2).flatten(2))

    def _projections(
        self, x: Tensor, positions: Tensor, angles: Angles | None
    ) -> tuple[Project, Project, Angles | None]:
        """What makes q, k and v of x, what comes after attention, and what angles are left between.

        Where no kernel changes the basis on its way, it goes into the weights if that is less work.
        """
        rope, tokens = self.rope, x.shape[0] * x.shape[1]
        if (
            not (isinstance(angles, CommutingAngles) and isinstance(rope, RotaryEmbedding))
            or angles.basis is None
            or tokens < self.qkv.in_features
            or not (_is_plain(self.qkv) and _is_plain(self.proj))
            or _hooked(rope)
        ):
            return self.qkv, self.proj, angles
        order, basis = rope.channel_order, angles.basis
        if ops.select_backend(angles, rope.backend, x, x, positions, order).backend != "spectral":
            return self.qkv, self.proj, angles
        parts = 3 if self.rotate_values else 2
        turned = parts * x.shape[-1]
        weight, bias = (
            torch.cat((ops.basis_into_outputs(p[:turned], parts, basis, order), p[turned:]))
            for p in (self.qkv.weight, self.qkv.bias)
        )
        leave: Project = self.proj
        if self.rotate_values:
            after = ops.basis_into_inputs(self.proj.weight, self.num_heads, basis, order)
            leave = _linear(after, self.proj.bias)
        without = CommutingAngles(None, angles.frequencies, angles.block_size)
        return _linear(weight, bias), leave, without

    @torch.no_grad()
    def set_locality_bias(self, strength: float) -> None:
        """Give queries and keys one bias b, so that scores fall with the distance.

        With b alone, the score of a token with itself is ``strength``, b·b / √D, and with a token
        at distance x it is b·R(x)b / √D, which is smaller.
        """
        if self.rope is None:
            raise ValueError("set_locality_bias: needs a rope, and this attention has none")
        width = self.qkv.in_features
        self.qkv.bias[: 2 * width] = (strength / (width / self.num_heads) ** 0.5) ** 0.5


def _linear(weight: Tensor, bias: Tensor | None) -> Project:
    return functools.partial(nn.functional.linear, weight=weight, bias=bias)


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing is lost where the weight is used and the module not called: no adapter, no
    hook, no weight that is more than numbers."""
    plain = type(module) is nn.Linear and all(
        type(parameter) is nn.Parameter for parameter in (module.weight, module.bias)
    )
    patched = "forward" in vars(module) or _hooked(module)
    return plain and not (patched or module._backward_hooks or module._backward_pre_hooks)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rope: RotaryEmbedding | None = None,
        rotate_values: bool = False,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)

        def skip() -> nn.Module:
            return DropPath(drop_path) if drop_path else nn.Identity()

        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, rope=rope, rotate_values=rotate_values)
        self.scale1, self.skip1 = scale(), skip()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.scale2, self.skip2 = scale(), skip()

    def forward(
        self, x: Tensor, positions: Tensor, angles: Angles | None = None, **options: Any
    ) -> Tensor:
        """``options`` are those of its attention."""
        x = x + self.skip1(self.scale1(self.attn(self.norm1(x), positions, angles, **options)))
        return x + self.skip2(self.scale2(self.mlp(self.norm2(x))))
