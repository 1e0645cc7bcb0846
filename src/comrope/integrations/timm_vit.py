"""timm's vision transformers: plain ones, EVA and the rotary ViTs, NaFlex.

Their attention layers call ``q_norm`` and ``k_norm`` directly before attention, with
(B, heads, T, D). Hooks of these modules rotate. The model's own rotation is not passed to the
layers.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from comrope.inits import PlaneFrequencies, PlaneInit, Shape
from comrope.integrations.rebinding import ROTATION, deref
from comrope.integrations.token_positions import TokenPositions, axial, centered, normalized
from comrope.methods import METHODS, method_class
from comrope.rotary import RotaryEmbedding

__all__ = ["TIMM_MODELS", "is_timm_model", "swap_timm_model"]

TIMM_MODELS = ("VisionTransformer", "Eva", "NaFlexVit")
ATTENTION = ("Attention", "AttentionRope", "EvaAttention")


class RotateQueries:
    """Forward hook of ``q_norm``: rotate queries with the rotation of the layer.

    The reference to the layer is weak: see ``rebinding.Forward``.
    """

    def __init__(self, layer: nn.Module, positions: TokenPositions) -> None:
        self.__setstate__((layer, positions))

    def __getstate__(self) -> tuple[nn.Module, TokenPositions]:
        return self._layer(), self.positions

    def __setstate__(self, state: tuple[nn.Module, TokenPositions]) -> None:
        layer, self.positions = state
        self._layer: Any = weakref.ref(layer)
        self.angles: Any = None

    @property
    def rotation(self) -> Any:
        return getattr(deref(self._layer), ROTATION)

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.angles = self.rotation.angles().cache_spectrum()
        return self.rotate(output)

    def rotate(self, x: Tensor) -> Tensor:
        positions, prefix = self.positions.at(x.shape[-2])
        x = self.rotation.rotate(x, positions, num_prefix_tokens=prefix, angles=self.angles)
        scale = self.rotation.attention_scaling
        return x if scale == 1.0 else x * scale


class RotateKeys:
    """Forward hook of ``k_norm``: rotate keys with the same angles, after the queries."""

    def __init__(self, queries: RotateQueries) -> None:
        self.queries = queries

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        rotated = self.queries.rotate(output)
        self.queries.angles = None
        return rotated


class WithoutRope:
    """Forward pre-hook of an attention layer: drop the model's own rotation."""

    def __call__(self, module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        return inputs, options | {"rope": None} if "rope" in options else options


@dataclass(frozen=True)
class _LearnedFrequencies(PlaneInit):
    """The learned frequencies of a layer of a model of timm: each plane has its own direction."""

    name: ClassVar[str] = "rope"  # the name that stands for it in ``swap``
    frequencies: Tensor | None = field(default=None, repr=False, compare=False)  # (2, H m f)

    def check(self, shape: Shape) -> None:
        if self != type(self)():
            raise ValueError(
                "base, position_scale: expected none, since the rotation starts with the "
                f"frequencies that the model has learned; got {self.base}, {self.position_scale}"
            )
        assert self.frequencies is not None
        planes = shape.num_blocks * shape.num_planes
        heads = self.frequencies.numel() // (shape.num_axes * planes)
        if shape.num_heads == 1 < heads:
            raise ValueError(
                f"shared_heads: expected False, since the {heads} heads of the model have learned "
                "different frequencies, or another init; got True"
            )

    def planes(self, shape: Shape, like: Tensor) -> PlaneFrequencies:
        assert self.frequencies is not None
        sizes = (shape.num_axes, shape.num_heads, shape.num_blocks, shape.num_planes)
        direction = self.frequencies.to(like.device).reshape(sizes)
        return PlaneFrequencies(direction, direction.new_ones(direction.shape[1:]))


def is_timm_model(model: nn.Module) -> bool:
    return any(
        kind.__name__ in TIMM_MODELS and kind.__module__.startswith("timm.models.")
        for kind in type(model).__mro__
    )


def _attention_layers(model: nn.Module) -> list[nn.Module]:
    """Find the attention layers of the blocks, without attention pooling."""
    host: Any = model
    layers = [
        module
        for module in host.blocks.modules()
        if hasattr(module, "q_norm") and hasattr(module, "k_norm")
    ]
    for layer in layers:
        if type(layer).__name__ not in ATTENTION or not hasattr(layer, "head_dim"):
            raise ValueError(
                f"model: its layers of type {type(layer).__name__} are not supported; expected "
                f"timm's {', '.join(ATTENTION)}"
            )
    if not layers:
        raise ValueError(f"model: found no attention layer of timm's in {type(model).__name__}")
    return layers


def swap_timm_model(
    model: nn.Module,
    method: str,
    *,
    class_position: str | None = None,
    perturbation: float = 0.0,
    **options: Any,
) -> TokenPositions:
    """Give every attention layer a rotation; ``options`` are those of ``RotaryEmbedding``."""
    layers: list[Any] = _attention_layers(model)
    rope: Any = getattr(model, "rope", None)
    options.setdefault("init", "zeros" if rope is None else "rope")
    theirs = rope is not None and options["init"] == "rope"
    if type(getattr(model, "patch_drop", None)).__name__ == "PatchDropout":
        raise ValueError("model: expected patch_drop_rate=0; dropped patches are not supported")
    if class_position is None:
        class_position = "center" if rope is None else "unrotated"
    convention, start = _convention_of(rope) if theirs else (normalized, {})
    host: Any = model
    positions = TokenPositions(
        convention,
        class_position=class_position,
        perturbation=perturbation,
        prefix=host.num_prefix_tokens,
    )
    embedding = host.embeds if hasattr(model, "embeds") else host.patch_embed
    mixed = theirs and type(rope).__name__ == "RotaryEmbeddingMixed"
    half = theirs and getattr(rope, "rotate_half", False)
    if any(theirs and getattr(layer, "rotate_half", False) != half for layer in layers):
        raise ValueError("model: its layers and its rotary embedding differ in rotate_half")
    options.setdefault("channel_order", "half" if half else "interleaved")
    if options.get("base") is not None:
        start.pop("frequencies", None)
    if mixed:
        _check_directions(method)
    options = start | options
    rotations = []
    for number, layer in enumerate(layers):
        if mixed:
            learned = rope.freqs[:, number].detach().clone()
            options["init"] = _LearnedFrequencies(frequencies=learned)
        rotation = RotaryEmbedding(
            method,
            num_heads=getattr(layer, "num_kv_heads", layer.num_heads),
            head_dim=layer.head_dim,
            num_axes=2,
            device=next(layer.parameters()).device,
            **options,
        )
        rotations.append(rotation)
    for layer, rotation in zip(layers, rotations, strict=True):  # the model is unchanged up to here
        layer.add_module(ROTATION, rotation.train(layer.training))
        queries = RotateQueries(layer, positions)
        layer.q_norm.register_forward_hook(queries)
        layer.k_norm.register_forward_hook(RotateKeys(queries))
        layer.register_forward_pre_hook(WithoutRope(), with_kwargs=True)
    embedding.register_forward_hook(positions, with_kwargs=True)
    return positions


def _convention_of(rope: Any) -> tuple[Any, dict[str, Any]]:
    """Return the convention of positions, and the options for the model's own frequencies."""
    kind = type(rope).__name__
    flipped = getattr(rope, "grid_indexing", "ij") == "xy"
    if kind != "RotaryEmbeddingDinoV3" and getattr(rope, "aug_active", False):
        raise ValueError(
            f"model: its rotary embedding ({kind}) augments coordinates in training, which is not "
            "supported; expected one without shift_coords, jitter_coords and rescale_coords"
        )
    if kind == "RotaryEmbeddingMixed":
        return partial(axial, flipped=flipped), {}
    indexed = getattr(rope, "grid_type", None) in (None, "index")  # timm before 1.0.31 has no types
    if kind == "RotaryEmbeddingCat" and not rope.in_pixels and indexed:
        convention = partial(
            axial, offset=rope.grid_offset, reference=rope.ref_feat_shape, flipped=flipped
        )
        bands = rope._compute_bands()
    elif kind == "RotaryEmbeddingDinoV3":
        convention = partial(
            centered,
            offset=rope.grid_offset,
            normalize=rope.normalize_coords,
            flipped=flipped,
            augment=partial(_augmented, rope),
        )
        bands = 2 * math.pi / rope._compute_periods()
    else:
        raise ValueError(
            f"model: cannot start from its rotary embedding ({kind}); "
            "expected RotaryEmbeddingCat, RotaryEmbeddingMixed or RotaryEmbeddingDinoV3, or "
            "init='zeros' or 'normal'"
        )
    return convention, {"frequencies": bands.tolist(), "axis_order": "contiguous"}


def _augmented(rope: Any, x: Tensor) -> Tensor:
    """Augment coordinates (..., 2) as DINOv3 does: shift, scale by axis, scale both axes.

    Uses only the attributes of ``rope``, because its methods differ between versions of timm. One
    draw for all images of a batch, on the device of the coordinates.
    """
    if not rope.training or not rope.aug_active:
        return x

    def factor(most: float, axes: int) -> Tensor:
        return x.new_empty(axes).uniform_(-math.log(most), math.log(most)).exp()

    if rope.shift_coords is not None:
        x = x + x.new_empty(2).uniform_(-rope.shift_coords, rope.shift_coords)
    if rope.jitter_coords is not None:
        x = x * factor(rope.jitter_coords, 2)
    if rope.rescale_coords is not None:
        x = x * factor(rope.rescale_coords, 1)
    return x


def _check_directions(method: str) -> None:
    """Raise unless a method can have the learned frequencies of a model."""
    if not method_class(method).direction_per_plane:
        able = [name for name in METHODS if method_class(name).direction_per_plane]
        raise ValueError(
            f"method: {method!r} cannot have the model's frequencies, with another direction for "
            f"every plane; expected one of {', '.join(able)}, or another init"
        )
