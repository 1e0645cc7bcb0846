"""RotaryEmbedding: a method and an op, ready to stand in front of any attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comrope import _checks, ops
from comrope._dtypes import compute_dtype, no_autocast
from comrope._inputs import (
    check_axes,
    check_one_and_places,
    check_pair,
    check_places,
    check_projection,
    check_vectors,
    check_vectors_and_places,
)
from comrope.angles import Angles
from comrope.methods import create_method
from comrope.positions import check_positions

__all__ = ["RotaryEmbedding"]

CHANNEL_ORDERS = ("interleaved", "half")


class RotaryEmbedding(nn.Module):
    """Rotate queries and keys so that their scores depend on relative positions.

    Args:
        method: One of ``comrope.METHODS``.
        num_heads: Heads of the keys. Queries may have any multiple of it (grouped queries).
        head_dim: Channels a head.
        num_axes: Coordinates a position.
        block_size: Size of the rotated blocks, a divisor of ``head_dim``.
        init: ``"normal"``, the method's ordinary start, random with frequencies of about 1.4
            (blocks of two) to 5.5 (sixteen) radians per unit, so for positions in about [0, 1];
            ``"zeros"``, no rotation at all, so standard attention; ``"rope"``, vanilla RoPE;
            ``"turned"``, vanilla RoPE with the axes turned at random, head by head, so that phases
            grow in all directions (on two axes the start of RoPE-Mixed's authors, with base 10);
            ``"scattered"``, every plane (in ``"comrope-ld"`` every block) in a direction of its
            own, as fast as any of vanilla RoPE's, logarithms of speeds uniform.
        spread: Multiplies the frequencies that init ``"normal"`` draws. (RoPE-Mixed's are those of
            blocks of two: 2.65 gives it the start of blocks of eight.)
        base: Vanilla RoPE's base, 10000 by default; for method ``"rope"`` and the inits ``"rope"``,
            ``"turned"`` and ``"scattered"``.
        position_scale: Multiplies vanilla RoPE's frequencies, one number or one per axis, 1 by
            default. They are made for positions that count patches: for positions in [0, 1] give
            the grid of the training resolution.
        frequencies: Vanilla RoPE's themselves, one a plane of an axis, in place of those of
            ``base``: what a pre-trained model has, scaled in whatever way.
        axis_order: Which blocks turn with which axis, in vanilla RoPE and ``"comrope-ap"``:
            ``"alternating"``, as in the paper, or ``"contiguous"``, first all blocks of axis 0, as
            in DINOv3 and timm's models. The same up to the order of channels.
        channel_order: Which channels form a plane: ``"interleaved"``, neighbours; ``"half"``,
            channel c and c + head_dim / 2, as in Hugging Face's language models. Angle and
            rotation matrices always speak of the interleaved order.
        num_prefix_tokens: Leading tokens that are left unrotated.
        backend: ``"auto"``, ``"triton"`` (kernels for an NVIDIA GPU), ``"spectral"`` or
            ``"reference"``; ``chosen_backend`` says what ``"auto"`` comes to, and why.
        options: What the method alone takes: ``shared_theta`` of ``"comrope-ld"``.

    Casting the module to bfloat16 or float16 rounds its learned angles as it rounds weights, which
    long ranges of positions notice; under autocast they stay as they are.
    """

    def __init__(
        self,
        method: str,
        *,
        num_heads: int,
        head_dim: int,
        num_axes: int = 2,
        block_size: int = 8,
        init: str = "normal",
        spread: float = 1.0,
        base: float | None = None,
        position_scale: float | Sequence[float] | None = None,
        frequencies: Sequence[float] | None = None,
        axis_order: str = "alternating",
        channel_order: str = "interleaved",
        num_prefix_tokens: int = 0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.method = create_method(
            method,
            num_heads=num_heads,
            head_dim=head_dim,
            num_axes=num_axes,
            block_size=block_size,
            init=init,
            spread=spread,
            base=base,
            position_scale=position_scale,
            frequencies=frequencies,
            axis_order=axis_order,
            device=device,
            dtype=dtype,
            **options,
        )
        self.channel_order = _checks.one_of("channel_order", channel_order, CHANNEL_ORDERS)
        if channel_order == "half" and head_dim % 2:
            raise ValueError(f"head_dim: channel_order 'half' needs an even one, got {head_dim}")
        self.num_prefix_tokens = _checks.integer("num_prefix_tokens", num_prefix_tokens, 0)
        self.backend = backend
        with torch.no_grad():
            ops.choose_backend(self.angles(), backend, channel_order=channel_order)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotated q and k, whose scores equal those of R(x) q . R(y) k.

        Scores between outputs of this module mean something, single outputs do not: a change of
        basis that cancels in the scores is left in them (see ``spectrum``), in those of prefix
        tokens too. So do not mix them with keys that did not pass through here, or with a cache
        from another backend or from before a weight update.

        Args:
            q: Queries (B, H, T, D).
            k: Keys (B, H, T, D), or with fewer heads that divide those of q.
            positions: (T, N), shared by the batch, or (B, T, N). Rows of prefix tokens may be left
                out; they are not used.
            num_prefix_tokens: Overrides the module's own number for this call.
            angles: What ``angles`` gives, if it is at hand already.

        Computed in the widest dtype that comes in, at least float32. The results are kept for the
        backward pass: do not change them in place.
        """
        prefix = self.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
        check_vectors_and_places(self.method, q, k, positions, prefix)
        return ops.rotate(q, k, positions, **self._options(prefix, angles))

    def rotate(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """Queries, keys or values alone (B, heads, T, D), turned as ``forward`` does q and k at
        once.

        For attention layers that hand them out one after the other. Hooks do not see it.
        """
        return self._turn_one(ops.rotate_one, x, positions, num_prefix_tokens, angles)

    def unrotate(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """The inverse of ``rotate``, for x (B, heads, T, D): of what attention makes of turned
        values.

        ``unrotate(attend(q, k, rotate(v, y)), x)`` with rotated q and k is
        sum_j a_ij R(x_i)^T R(y_j) v_j: values tell where they are from, for methods that commute
        as seen from the query, R(y_j - x_i). As of scores, what is turned and what turns it back
        belong together: the same parameters, backend and dtype, best the same ``angles``.
        """
        return self._turn_one(ops.unrotate, x, positions, num_prefix_tokens, angles)

    def unrotate_before(
        self,
        x: Tensor,
        positions: Tensor,
        weight: Tensor,
        *,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x and a weight whose product is that of ``unrotate(x, positions)`` and ``weight``.

        ``weight`` (C, heads * D) projects the heads of x (B, heads, T, D), side by side: what comes
        after attention. It takes the basis, of which every token then is spared the product.
        """

        def turn(x: Tensor, positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            check_projection(weight, x)
            return ops.unrotate_before(x, positions, weight=weight, **options)

        return self._turn_one(turn, x, positions, num_prefix_tokens, angles)

    def packed(
        self,
        qkv: Tensor,
        positions: Tensor,
        *,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, rotated k and v, each (B, heads, T, D), out of one tensor.

        ``qkv`` is (B, T, heads, D), the heads of the queries, then of the keys, then of the values:
        what one projection leaves behind. The kernels save copies here, in the backward pass too.
        ``in_place`` gives it away: without gradients they turn q and k where they lie. Hooks on
        this module do not see it.
        """
        prefix = self.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
        heads = self.method.num_heads
        if qkv.ndim != 4 or qkv.shape[2] < 3 * heads:
            raise ValueError(
                f"qkv: expected shape (B, T, heads, D) with the heads of q, k and v, at least "
                f"{3 * heads}, got {tuple(qkv.shape)}"
            )
        batch, tokens, all_heads, dim = qkv.shape  # (cutting it up to look at the parts takes time)
        of_k = torch.Size((batch, heads, tokens, dim))
        of_q = torch.Size((batch, all_heads - 2 * heads, tokens, dim))
        check_vectors(self.method, "qkv", of_q, qkv.dtype)
        check_pair(self.method, of_q, of_k)
        check_places(self.method, of_q, positions, prefix)
        options = self._options(prefix, angles)
        return ops.rotate_packed(qkv, positions, key_heads=heads, in_place=in_place, **options)

    def angles(self) -> Angles:
        """The rotation as plain tensors (see ``comrope.angles``)."""
        return self.method.angles()

    def chosen_backend(self, q: Tensor, k: Tensor, positions: Tensor) -> ops.Choice:
        """The backend that these tensors would be rotated with, and the reason."""
        return ops.choose_backend(self.angles(), self.backend, q, k, positions, self.channel_order)

    def angle_matrices(self) -> Tensor:
        """The skew-symmetric A_i, (N, H, m, b, b)."""
        return self.method.angles().matrices()

    def rotation_matrices(self, positions: Tensor) -> Tensor:
        """R(x) = exp(sum_i x_i A_i): (T, H, m, b, b), or (B, T, H, m, b, b) for (B, T, N)."""
        check_positions("positions", positions)
        check_axes(self.method, positions)
        matrices = self.angle_matrices()
        dtype = compute_dtype(positions, matrices)
        with no_autocast(positions.device):
            return ops.rotation_matrices(matrices.to(dtype), positions.to(dtype))

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Basis Q (H, m, b, b) and frequencies w (N, H, m, b // 2), A_i = Q diag_k(w_ik J) Q^T.

        The spectral backend returns q' = diag_k(Rot(sum_i w_ik x_i)) Q^T q, block by block. For
        ``comrope-ap`` and ``comrope-ld`` with b > 2 without gradient: where frequencies repeat, a
        basis has none. An error for ``liere`` on more than one axis: it has no common basis.
        """
        return self.method.angles().spectrum()

    def reset_parameters(self) -> None:
        """Start anew, as ``init`` says; also after construction on the meta device."""
        self.method.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay: all of them are angles."""
        return {name for name, _ in self.named_parameters()}

    def extra_repr(self) -> str:
        return (
            f"channel_order={self.channel_order!r}, num_prefix_tokens={self.num_prefix_tokens}, "
            f"backend={self.backend!r}"
        )

    def _turn_one(
        self,
        op: Callable[..., Any],
        x: Tensor,
        positions: Tensor,
        prefix: int | None,
        angles: Angles | None,
    ) -> Any:
        heads = self.method.num_heads
        prefix = self.num_prefix_tokens if prefix is None else prefix
        check_one_and_places(self.method, x, positions, prefix)
        return op(x, positions, key_heads=heads, **self._options(prefix, angles))

    def _options(self, prefix: int, angles: Angles | None) -> dict[str, Any]:
        """As all of ``ops`` take them."""
        return {
            "angles": self.angles() if angles is None else angles,
            "backend": self.backend,
            "num_prefix_tokens": prefix,
            "channel_order": self.channel_order,
        }
