"""Self-attention with rotated queries and keys, and the transformer block around it.

Shapes: B batch, T tokens, C channels, D channels per head, N axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

from comrope import ops
from comrope.angles import Angles, CommutingAngles
from comrope.ops.layout import unpack
from comrope.rotary import RotaryEmbedding

__all__ = [
    "Attend",
    "Attention",
    "Block",
    "attend_to_all",
    "is_hooked",
    "log_temperature",
    "uses_scores_only",
]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Project = Callable[[Tensor], Tensor]


def attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from every query to every key; k and v may have fewer heads than q."""
    grouped = q.shape[1] != k.shape[1]
    return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)


def uses_scores_only(attend: Attend) -> bool:
    """Return whether queries and keys are used through scores only, and values through their sums.

    This library's functions say so in an attribute. Others may use the rotated vectors themselves.
    """
    return bool(getattr(attend, "scores_only", False))


attend_to_all.scores_only = True  # type: ignore[attr-defined]


def log_temperature(visible: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """Return factors of queries that keep attention sharp beyond the training context.

    Args:
        visible: Numbers n of tokens that queries attend to.
        context: That of training, at least 2.
        dtype: Of the factors.

    Returns:
        log n / log context where n > context, otherwise 1.

    The entropy of attention over n tokens grows with log n, and scores that grow with log n keep it
    (Su, kexue.fm/archives/8823, 2021; Chiang and Cholak, arXiv 2202.12172, 2022). This formula is
    that of Qwen's ``use_logn_attn``. Scalable softmax (arXiv 2501.19399) multiplies by s log n with
    a learned s, at all lengths.
    """
    factors = visible.to(dtype).log() / math.log(context)
    return torch.where(visible > context, factors, 1.0)


class Attention(nn.Module):
    """Multi-head self-attention, with a rotation of queries and keys.

    Args:
        dim: C.
        num_heads: Heads of the queries, a divisor of C.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads`` and by default the same
            (grouped queries).
        bias: Whether the projections have biases.
        rope: The rotation; None is attention without positions.
        owns_rope: Whether the rotation is a part of this layer. Otherwise it is a part of the
            model, which shares it among its layers.
        rotate_values: Rotate values too, and the outputs of attention back. Outputs then depend on
            the positions of values relative to the query. (Code that fetches the parameters of
            ``rope`` for one call, such as sharding, must keep them until the layer returns.)
    """

    rotate_values = False  # for pickles of layers that are older than this option

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        rope: RotaryEmbedding | None = None,
        owns_rope: bool = True,
        rotate_values: bool = False,
    ) -> None:
        super().__init__()
        if rotate_values and rope is None:
            raise ValueError("rotate_values: expected False without a rope, got True")
        self.rotate_values = rotate_values
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        kv_dim = dim // num_heads * self.num_kv_heads
        self.qkv = nn.Linear(dim, dim + 2 * kv_dim, bias=bias)
        if owns_rope:
            self.rope = rope
        else:  # not as a submodule, which would repeat its parameters in the state dict
            self.__dict__["rope"] = rope
        self.proj = nn.Linear(dim, dim, bias=bias)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load pickles of layers that are older than ``num_kv_heads``."""
        super().__setstate__(state)
        self.__dict__.setdefault("num_kv_heads", self.num_heads)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        angles: Angles | None = None,
        *,
        attend: Attend = attend_to_all,
    ) -> Tensor:
        """Attend among all tokens.

        Args:
            x: (B, T, C).
            positions: (T, N) or (B, T, N).
            angles: The precomputed result of ``rope.angles()``.
            attend: Called with the rotated q and k, and the (rotated) v, (B, heads, T, D) each.
        """
        if angles is None and isinstance(self.rope, RotaryEmbedding) and not is_hooked(self.rope):
            angles = self.rope.angles()
            if self.rotate_values:  # needed twice
                angles = angles.cache_spectrum()
        project_in, project_out, angles = self._projections(
            x, positions, angles, scores_only=uses_scores_only(attend)
        )
        qkv = project_in(x).unflatten(-1, (self.num_heads + 2 * self.num_kv_heads, -1))
        if self.rope is None or is_hooked(self.rope):
            q, k, v = unpack(qkv, self.num_kv_heads)
            if self.rope is not None:  # a call of the module, so that its hooks run
                q, k = self.rope(q, k, positions, angles=angles)
        else:
            inplace = not self.qkv._forward_hooks  # a hook may have kept the output of qkv
            q, k, v = self.rope.rotate_qkv(qkv, positions, angles=angles, inplace=inplace)
        if self.rope is None or not self.rotate_values:
            mixed = attend(q, k, v)
        else:
            mixed = attend(q, k, self.rope.rotate(v, positions, angles=angles))
            mixed, project_out = self._rotate_back(mixed, positions, angles, project_out)
        return project_out(mixed.transpose(1, 2).flatten(2))

    def _projections(
        self, x: Tensor, positions: Tensor, angles: Angles | None, *, scores_only: bool
    ) -> tuple[Project, Project, Angles | None]:
        """Return the projections before and after attention, and the angles to rotate with.

        The basis of the angles is folded into the weights if that costs less than multiplying
        every token by it, and if no kernel does that multiplication.
        """
        rope, tokens = self.rope, x.shape[0] * x.shape[1]
        if angles is None or not isinstance(rope, RotaryEmbedding) or is_hooked(rope):
            return self.qkv, self.proj, angles
        order = rope.channel_order
        if ops.select_backend(angles, rope.backend, x, x, positions, order).backend != "spectral":
            return self.qkv, self.proj, angles
        angles = ops.to_commuting(angles, positions if scores_only else None)
        assert isinstance(angles, CommutingAngles)
        plain = _is_plain(self.qkv) and _is_plain(self.proj)
        if angles.basis is None or tokens < self.qkv.in_features or not plain:
            return self.qkv, self.proj, angles
        folded = self.folded_projections(angles.basis)
        project_out: Project = self.proj
        if "proj.weight" in folded:
            project_out = _linear(folded["proj.weight"], self.proj.bias)
        project_in = _linear(folded["qkv.weight"], folded.get("qkv.bias"))
        return project_in, project_out, angles._replace(basis=None)

    def _rotate_back(
        self, x: Tensor, positions: Tensor, angles: Angles | None, project: Project
    ) -> tuple[Tensor, Project]:
        """Undo the rotation of values after attention; return x and the projection that follows."""
        rope: Any = self.rope
        if not (isinstance(rope, RotaryEmbedding) and _is_plain(self.proj)):
            return rope.rotate(x, positions, inverse=True, angles=angles), project
        own = self.proj.weight
        x, weight = rope._inverse_with_projection(x, positions, own, angles=angles)
        return x, project if weight is own else _linear(weight, self.proj.bias)

    def folded_projections(self, basis: Tensor, *, exact: bool = False) -> dict[str, Tensor]:
        """Return the parameters that change if the rotation's basis is folded into them, by name.

        Args:
            basis: Q (heads, m, b, b) of the rotation, which keeps only its frequencies.
            exact: Compute in float64, so that weights are rounded once.

        Differentiable; the layer itself is not changed.
        """
        if self.rope is None:
            raise ValueError("basis: expected a layer with a rope to fold it from")
        order, dim = self.rope.channel_order, self.qkv.in_features
        group = self.num_heads // self.num_kv_heads
        queries, keys = dim, dim // group
        rotated = queries + (2 if self.rotate_values else 1) * keys
        # Rows of parameters, and their bases: the queries of a group have that of their key.
        parts = [(rotated, basis)]
        if group > 1:
            parts = [(queries, basis.repeat_interleave(group, dim=0)), (rotated - queries, basis)]
        sizes = [rows for rows, _ in parts]
        folded = {}
        for name, parameter in (("qkv.weight", self.qkv.weight), ("qkv.bias", self.qkv.bias)):
            if parameter is not None:
                *changed, rest = parameter.split([*sizes, parameter.shape[0] - rotated])
                rows = [
                    ops.fold_into_outputs(part, own, order, exact=exact)
                    for part, (_, own) in zip(changed, parts, strict=True)
                ]
                folded[name] = torch.cat((*rows, rest))
        if self.rotate_values:
            folded["proj.weight"] = ops.fold_into_inputs(
                self.proj.weight, basis, order, self.num_heads, exact=exact
            )
        return folded

    @torch.no_grad()
    def set_locality_bias(self, strength: float) -> None:
        """Give queries and keys one bias b, so that scores fall with the distance.

        With b alone, the score of a token with itself is ``strength``, b·b / √D, and with a token
        at distance x it is b·R(x)b / √D, which is smaller.
        """
        if self.rope is None:
            raise ValueError("set_locality_bias: needs a rope, and this attention has none")
        width = self.qkv.in_features
        if self.qkv.bias is None:
            raise ValueError("set_locality_bias: needs biases, and this attention has none")
        self.qkv.bias[: 2 * width] = (strength / (width / self.num_heads) ** 0.5) ** 0.5


def _linear(weight: Tensor, bias: Tensor | None) -> Project:
    return functools.partial(nn.functional.linear, weight=weight, bias=bias)


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module's weights can be used without calling it.

    Not with adapters, hooks, or tensor subclasses such as quantized weights.
    """
    plain = type(module) is nn.Linear and all(
        parameter is None or type(parameter) is nn.Parameter
        for parameter in (module.weight, module.bias)
    )
    patched = "forward" in vars(module) or is_hooked(module)
    return plain and not (patched or module._backward_hooks or module._backward_pre_hooks)


def is_hooked(module: nn.Module) -> bool:
    """Return whether hooks run when a module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class Block(nn.Module):
    """A pre-norm transformer block.

    Args:
        dim: C.
        num_heads, num_kv_heads, bias, rope, owns_rope, rotate_values: As in ``Attention``.
        norm: Called with C and ``eps``.
        mlp_ratio, drop_path, layer_scale: As in timm.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        norm: Callable[..., nn.Module] = nn.LayerNorm,
        rope: RotaryEmbedding | None = None,
        owns_rope: bool = True,
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

        self.norm1 = norm(dim, eps=1e-6)
        self.attn = Attention(
            dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            bias=bias,
            rope=rope,
            owns_rope=owns_rope,
            rotate_values=rotate_values,
        )
        self.scale1, self.skip1 = scale(), skip()
        self.norm2 = norm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), bias=bias)
        self.scale2, self.skip2 = scale(), skip()

    def forward(
        self, x: Tensor, positions: Tensor, angles: Angles | None = None, **options: Any
    ) -> Tensor:
        """Apply the block to x (B, T, C); ``options`` are those of ``Attention.forward``."""
        x = x + self.skip1(self.scale1(self.attn(self.norm1(x), positions, angles, **options)))
        return x + self.skip2(self.scale2(self.mlp(self.norm2(x))))
