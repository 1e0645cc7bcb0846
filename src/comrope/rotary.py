"""RotaryEmbedding: the module that rotates queries and keys before any attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comrope import _checks, ops
from comrope._deprecated import warn_deprecated
from comrope._dtypes import compute_dtype, no_autocast
from comrope._inputs import (
    check_angles,
    check_device,
    check_device_of_angles,
    check_num_axes,
    check_projection,
    check_qkv,
    check_queries_and_keys,
    check_single,
)
from comrope.angles import Angles
from comrope.inits import Init
from comrope.methods import create_method
from comrope.positions import check_positions

__all__ = ["RotaryEmbedding"]

CHANNEL_ORDERS = ("interleaved", "half")


class RotaryEmbedding(nn.Module):
    """Rotate queries and keys so that their scores depend on relative positions.

    Args:
        method: One of ``comrope.METHODS``.
        num_heads: Heads of the keys. Queries may have any multiple of it (grouped queries).
        head_dim: Channels per head.
        num_axes: Coordinates per position.
        block_size: Size of the rotated blocks, a divisor of ``head_dim``.
        init: How learned angles start: a name in ``comrope.inits.NAMES``, or an object of
            ``comrope.inits``, which describes them. ``"normal"``: random, with frequencies of about
            1.4 (blocks of two) to 5.5 (blocks of sixteen) radians per unit, so for positions in
            about [0, 1]. ``"zeros"``: no rotation, so standard attention. ``"rope"``: vanilla RoPE,
            the default of method ``"rope"``.
        spread: Short for ``init=inits.Normal(std=...)``.
        base, position_scale, frequencies, rotated_share: Short for these fields of initializations
            that have them, such as ``inits.RoPE``.
        axis_order: Which blocks rotate with which axis, in vanilla RoPE and ``"comrope-ap"``:
            ``"alternating"``, as in the paper, or ``"contiguous"``, all blocks of axis 0 first, as
            in DINOv3 and timm's models. They differ in the order of channels only.
        shared_heads: Whether all heads have one set of learned parameters, as in GRAPE
            (arXiv 2512.07805), instead of one each.
        log_frequencies: Whether the logarithms of frequencies are learned, in methods that learn
            frequencies directly; see ``methods.learned_frequencies``.
        channel_order: Which channels form a plane: ``"interleaved"``, neighbours; ``"half"``,
            channels c and c + head_dim / 2, as in Hugging Face's language models. Angle and
            rotation matrices always use the interleaved order.
        num_prefix_tokens: Leading tokens that are left unrotated.
        backend: ``"auto"``, ``"triton"`` (kernels for an NVIDIA GPU), ``"spectral"`` or
            ``"reference"``; ``select_backend`` returns what ``"auto"`` selects, and why.
        options: Options of the method, such as ``shared_theta`` of ``"comrope-ld"``.

    Casting the module to bfloat16 or float16 rounds its learned angles, which matters for long
    ranges of positions. Autocast does not change them.

    Attributes:
        attention_scaling: Factor of rotated queries and keys, usually 1; YaRN's scaling sets it.
    """

    attention_scaling: float = 1.0  # the default also of older pickles

    def __init__(
        self,
        method: str,
        *,
        num_heads: int,
        head_dim: int,
        num_axes: int = 2,
        block_size: int = 8,
        init: str | Init = "normal",
        spread: float = 1.0,
        base: float | None = None,
        position_scale: float | Sequence[float] | None = None,
        frequencies: Sequence[float] | None = None,
        rotated_share: float | None = None,
        axis_order: str = "alternating",
        shared_heads: bool = False,
        log_frequencies: bool = False,
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
            rotated_share=rotated_share,
            axis_order=axis_order,
            shared_heads=shared_heads,
            log_frequencies=log_frequencies,
            device=device,
            dtype=dtype,
            **options,
        )
        self.channel_order = _checks.one_of("channel_order", channel_order, CHANNEL_ORDERS)
        if channel_order == "half" and head_dim % 2:
            raise ValueError(f"head_dim: channel_order 'half' needs an even one, got {head_dim}")
        self.num_prefix_tokens = _checks.integer("num_prefix_tokens", num_prefix_tokens, 0)
        self.backend = _checks.one_of("backend", backend, ops.BACKENDS)
        if backend in ("spectral", "triton"):  # raise early if these angles do not allow it
            with torch.no_grad():
                ops.select_backend(self.angles(), backend, channel_order=channel_order)

    @property
    def name(self) -> str:
        """The method, one of ``comrope.METHODS``."""
        return self.method.name

    @property
    def num_heads(self) -> int:
        """Heads of the keys."""
        return self.method.num_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.method.head_dim

    @property
    def num_axes(self) -> int:
        """Coordinates per position."""
        return self.method.num_axes

    @property
    def block_size(self) -> int:
        """Size of the rotated blocks."""
        return self.method.block_size

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        key_positions: Tensor | None = None,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys; their scores equal those of R(x) q . R(y) k.

        Args:
            q: Queries (B, H, T, D).
            k: Keys (B, H, T, D), or with fewer heads that divide those of q.
            positions: (T, N), shared by the batch, or (B, T, N). Rows of prefix tokens are not
                used and may be left out.
            key_positions: Of keys other than those of self-attention, which may have another
                length S: (S, N) or (B, S, N). By default ``positions``.
            num_prefix_tokens: Overrides the module's own number for this call.
            angles: The precomputed result of ``angles``.

        Returns:
            Rotated q and k in their dtypes, computed in the widest dtype of all arguments, at least
            float32. They are saved for the backward pass: do not change them in place.

        Only scores between outputs of this module are defined. Every output, also of prefix tokens,
        contains a change of basis that cancels in the scores (see ``spectrum``). So do not combine
        outputs with keys that another module rotated, or with a cache from another backend or from
        before a weight update.
        """
        prefix = self.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
        check_queries_and_keys(self.method, q, k, positions, key_positions, prefix)
        options = self._options("q", q, prefix, angles)
        if key_positions is None:
            return self._scale(*ops.rotate(q, k, positions, **options))
        options |= {"angles": options["angles"].cache_spectrum(), "key_heads": k.shape[1]}
        q = ops.rotate_single(q, positions, **options)
        return self._scale(q, ops.rotate_single(k, key_positions, **options))

    def rotate(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        inverse: bool = False,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """Rotate queries, keys or values alone, as ``forward`` rotates q and k together.

        Args:
            x: (B, heads, T, D).
            positions: As in ``forward``.
            inverse: Undo the rotation, for the outputs of attention over rotated values.
            num_prefix_tokens: As in ``forward``.
            angles: As in ``forward``.

        With rotated q and k, ``rotate(attend(q, k, rotate(v, y)), x, inverse=True)`` is
        sum_j a_ij R(x_i)^T R(y_j) v_j. For methods that commute, R(x_i)^T R(y_j) = R(y_j - x_i), so
        outputs depend on the positions of values relative to the query. A rotation and its inverse
        need the same parameters, backend and dtype, best the same ``angles``. Hooks are not called.
        The result is not multiplied by ``attention_scaling``, which values do not get.
        """
        options = self._single_options(x, positions, num_prefix_tokens, angles)
        return ops.rotate_single(x, positions, inverse=inverse, **options)

    def rotate_qkv(
        self,
        qkv: Tensor,
        positions: Tensor,
        *,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split one tensor into q, k and v, and rotate q and k.

        Args:
            qkv: (B, T, heads, D), the heads of queries, then keys, then values, as one projection
                returns them. The kernels save copies here, in the backward pass too.
            positions: As in ``forward``.
            num_prefix_tokens: As in ``forward``.
            angles: As in ``forward``.
            inplace: Allow overwriting ``qkv``. Without gradients the kernels rotate q and k in it.

        Returns:
            Rotated q, rotated k, and v, (B, heads, T, D) each. Hooks are not called.
        """
        prefix = self.num_prefix_tokens if num_prefix_tokens is None else num_prefix_tokens
        check_qkv(self.method, qkv, positions, prefix)
        options = self._options("qkv", qkv, prefix, angles)
        q, k, v = ops.rotate_qkv(
            qkv, positions, key_heads=self.method.num_heads, inplace=inplace, **options
        )
        return *self._scale(q, k), v

    def angles(self) -> Angles:
        """Return the rotation as plain tensors (see ``comrope.angles``)."""
        return self.method.angles()

    def select_backend(self, q: Tensor, k: Tensor, positions: Tensor) -> ops.BackendChoice:
        """Return the backend that rotates these tensors, and the reason."""
        return ops.select_backend(self.angles(), self.backend, q, k, positions, self.channel_order)

    def angle_matrices(self) -> Tensor:
        """Return the skew-symmetric A_i, (N, H, m, b, b)."""
        return self.method.angles().matrices()

    def rotation_matrices(self, positions: Tensor) -> Tensor:
        """Return R(x) = exp(sum_i x_i A_i).

        Args:
            positions: (T, N) or (B, T, N).

        Returns:
            (T, H, m, b, b) or (B, T, H, m, b, b).
        """
        check_positions("positions", positions)
        check_num_axes(self.method, positions)
        matrices = self.angle_matrices()
        check_device("positions", positions, "the module", matrices.device)
        dtype = compute_dtype(positions, matrices)
        with no_autocast(positions.device):
            return ops.rotation_matrices(matrices.to(dtype), positions.to(dtype))

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the common basis and the frequencies: A_i = Q diag_k(w_ik J) Q^T.

        Returns:
            Q (H, m, b, b) and w (N, H, m, b // 2).

        The spectral backend returns q' = diag_k(Rot(sum_i w_ik x_i)) Q^T q, block by block. For
        ``comrope-ap`` and ``comrope-ld`` with b > 2 there is no gradient: a basis has none where
        frequencies repeat.

        Raises:
            ValueError: For ``liere`` on more than one axis, which has no common basis.
        """
        return self.method.angles().spectrum()

    def reset_parameters(self) -> None:
        """Initialize the parameters anew, also after construction on the meta device."""
        self.method.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay: all, since they are angles."""
        return {name for name, _ in self.named_parameters()}

    def extra_repr(self) -> str:
        return (
            f"channel_order={self.channel_order!r}, num_prefix_tokens={self.num_prefix_tokens}, "
            f"backend={self.backend!r}"
        )

    def unrotate(self, x: Tensor, positions: Tensor, **options: Any) -> Tensor:
        """Call ``rotate`` with ``inverse=True``; deprecated."""
        warn_deprecated("RotaryEmbedding.unrotate", "rotate(..., inverse=True)")
        return self.rotate(x, positions, inverse=True, **options)

    def unrotate_before(
        self, x: Tensor, positions: Tensor, weight: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return a vector and a weight with the product of ``weight`` and ``rotate``'s inverse;
        deprecated."""
        warn_deprecated("RotaryEmbedding.unrotate_before", "rotate(..., inverse=True)")
        return self._inverse_with_projection(x, positions, weight, **options)

    def packed(
        self, qkv: Tensor, positions: Tensor, *, in_place: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call ``rotate_qkv``; deprecated."""
        warn_deprecated("RotaryEmbedding.packed", "rotate_qkv(..., inplace=)")
        return self.rotate_qkv(qkv, positions, inplace=in_place, **options)

    def chosen_backend(self, q: Tensor, k: Tensor, positions: Tensor) -> ops.BackendChoice:
        """Call ``select_backend``; deprecated."""
        warn_deprecated("RotaryEmbedding.chosen_backend", "select_backend")
        return self.select_backend(q, k, positions)

    def _inverse_with_projection(
        self,
        x: Tensor,
        positions: Tensor,
        weight: Tensor,
        *,
        num_prefix_tokens: int | None = None,
        angles: Angles | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Split ``weight`` times the inverse rotation of x into a cheaper vector and weight.

        ``weight`` (C, heads * D) projects the heads of x (B, heads, T, D), side by side: the
        projection after attention. The basis is multiplied into it once, not into every token.
        """
        options = self._single_options(x, positions, num_prefix_tokens, angles)
        check_projection(weight, x)
        return ops.inverse_with_projection(x, positions, weight=weight, **options)

    def _scale(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.attention_scaling
        return (q, k) if scale == 1.0 else (q * scale, k * scale)

    def _single_options(
        self, x: Tensor, positions: Tensor, prefix: int | None, angles: Angles | None
    ) -> dict[str, Any]:
        """Check one tensor and return the options of its rotation."""
        prefix = self.num_prefix_tokens if prefix is None else prefix
        check_single(self.method, x, positions, prefix)
        return {"key_heads": self.method.num_heads, **self._options("x", x, prefix, angles)}

    def _options(self, label: str, x: Tensor, prefix: int, angles: Angles | None) -> dict[str, Any]:
        """Return the options that all functions of ``ops`` take, for a checked tensor."""
        if angles is None:
            name, angles = "the module", self.angles()
        else:
            name = "angles"
            check_angles(self.method, angles)
        check_device_of_angles(name, angles, label, x.device)
        return {
            "angles": angles,
            "backend": self.backend,
            "num_prefix_tokens": prefix,
            "channel_order": self.channel_order,
        }
