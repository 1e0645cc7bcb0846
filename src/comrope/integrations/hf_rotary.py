"""Hugging Face's models that already rotate: language models, and DINOv3.

Their attention gets cosines and sines (``position_embeddings``) and calls
``apply_rotary_pos_emb(q, k, cos, sin)`` before keys are cached. Here the pair contains the
positions and the layer's rotation instead, and a replacement of that function applies the rotation.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comrope.integrations.length import follows_length, frequency_ratio, rotate_with_ratio
from comrope.integrations.rebinding import (
    ROTATION,
    VALUES,
    names_in,
    replace_forward,
    with_global_replaced,
)
from comrope.methods import method_class
from comrope.rotary import RotaryEmbedding

__all__ = ["ROTATING_MODELS", "Positions", "is_rotating_model", "swap_rotating_model"]

ROTATING_MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox", "dinov3_vit",
)  # fmt: skip
THEIRS = "apply_rotary_pos_emb"
# The projections of values and of the outputs of attention, and those that rotated values need.
TO_VALUES, FROM_VALUES = ("v_proj",), ("o_proj", "dense")


class Positions(nn.Module):
    """Replacement of the module that computes cosines and sines; it returns positions."""

    num_axes: int

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def start(self) -> dict[str, Any]:
        """Return the options of ``RotaryEmbedding`` for the rotation that the model has now."""
        raise NotImplementedError


class TextPositions(Positions):
    """Positions of language models: (B, T, 1)."""

    num_axes = 1

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions, and the ratio of frequencies if they follow the length."""
        positions = position_ids.to(device=x.device, dtype=torch.float32)[..., None]
        if follows_length(self.stock):
            return positions, frequency_ratio(self.stock, x, position_ids)
        return positions, positions

    def start(self) -> dict[str, Any]:
        # An earlier input may have changed the frequencies of a module that follows the length.
        stock: Any = self.stock
        frequencies = stock.original_inv_freq if follows_length(stock) else stock.inv_freq
        return {"frequencies": frequencies.tolist()}


class PatchPositions(Positions):
    """Positions of DINOv3: patch centres (T, 2) from -1 to 1, augmented in training."""

    num_axes = 2

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        theirs = inspect.unwrap(type(self.stock).forward).__globals__
        config: Any = self.stock.config
        patch = config.patch_size
        rows, columns = (patch, patch) if isinstance(patch, int) else patch
        height, width = pixel_values.shape[-2:]
        positions = theirs["get_patches_center_coordinates"](
            height // rows, width // columns, dtype=torch.float32, device=pixel_values.device
        )
        if self.training:
            positions = theirs["augment_patches_center_coordinates"](
                positions,
                shift=config.pos_embed_shift,
                jitter=config.pos_embed_jitter,
                rescale=config.pos_embed_rescale,
            )
        return positions, positions

    def start(self) -> dict[str, Any]:
        inverse: Any = self.stock.inv_freq
        return {"frequencies": (2 * math.pi * inverse).tolist(), "axis_order": "contiguous"}


class ScaledRotation(RotaryEmbedding):
    """A rotation in pickles of version 0.1, which has another name for ``attention_scaling``."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = {"scaling": "attention_scaling"}
        super().__setstate__({names.get(name, name): value for name, value in state.items()})


class WithRotatedValues:
    """An attention layer whose values are rotated, and its outputs of attention rotated back.

    It has all attributes of the layer. Values are rotated before they are cached.

    Args:
        layer: The layer.
        rotation: Of its values.
        positions: Of its tokens in this call, (B, T, 1).
    """

    def __init__(self, layer: nn.Module, rotation: RotaryEmbedding, positions: Tensor) -> None:
        self.layer, self.rotation, self.positions = layer, rotation, positions
        self.angles = rotation.angles().cache_spectrum()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.layer, name)
        if name in TO_VALUES:
            return lambda x: self._rotate(found(x), inverse=False)
        if name in FROM_VALUES:
            return lambda x: found(self._rotate(x, inverse=True))
        return found

    def _rotate(self, x: Tensor, *, inverse: bool) -> Tensor:
        """Rotate all heads of x (B, T, heads * D)."""
        heads = x.unflatten(-1, (-1, self.rotation.head_dim)).transpose(1, 2)
        rotated = self.rotation.rotate(heads, self.positions, inverse=inverse, angles=self.angles)
        return rotated.transpose(1, 2).flatten(2)


def is_rotating_model(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in ROTATING_MODELS


def swap_rotating_model(
    model: nn.Module, method: str, *, rotate_values: bool = False, **options: Any
) -> None:
    """Give every attention layer a rotation; ``options`` are those of ``RotaryEmbedding``.

    With ``rotate_values``, also one for values, which starts at zero.
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = [part for part in model.modules() if THEIRS in names_in(type(part).forward)]
    holder, name, stock = _cosines_of(model, layers)
    is_vision = config.model_type == "dinov3_vit"
    positions: Positions = PatchPositions(stock) if is_vision else TextPositions(stock)
    values = _value_rotations(layers, method, heads, options) if rotate_values else []
    options.setdefault("init", "rope")
    if options["init"] == "rope" and options.get("base") is None:
        options = positions.start() | options
    rotations = [
        RotaryEmbedding(
            method,
            num_heads=heads,
            head_dim=2 * positions.num_axes * stock.inv_freq.numel(),
            num_axes=positions.num_axes,
            channel_order="half",
            device=next(layer.parameters()).device,
            **options,
        )
        for layer in layers
    ]
    for layer, rotation in zip(layers, rotations, strict=True):  # the model is unchanged up to here
        rotation.attention_scaling = float(getattr(stock, "attention_scaling", 1.0))
        layer.add_module(ROTATION, rotation.train(layer.training))
        replace_forward(layer, _forward_of)
    for layer, of_values in zip(layers, values, strict=False):
        layer.add_module(VALUES, of_values.train(layer.training))
    setattr(holder, name, positions.train(stock.training))


def _value_rotations(
    layers: list[nn.Module], method: str, heads: int, options: dict[str, Any]
) -> list[RotaryEmbedding]:
    """Return rotations of values, which start at zero so that outputs stay the same."""
    if not method_class(method).starts_at_zero:
        raise ValueError(
            f"rotate_values: expected a method that can start at zero, got {method!r}, which would "
            "change the outputs"
        )
    kept = {name: options[name] for name in ("block_size", "backend") if name in options}
    found = []
    for layer in layers:
        part: Any = layer
        if not all(any(hasattr(part, n) for n in names) for names in (TO_VALUES, FROM_VALUES)):
            raise ValueError(
                f"rotate_values: expected layers with {TO_VALUES[0]} and {FROM_VALUES[0]}, got "
                f"{type(layer).__name__}"
            )
        found.append(
            RotaryEmbedding(
                method,
                num_heads=heads,
                head_dim=part.head_dim,
                num_axes=1,
                init="zeros",
                device=next(layer.parameters()).device,
                **kept,
            )
        )
    return found


@functools.cache
def _forward_of(kind: Any) -> Callable[..., Any]:
    """Return a layer's forward pass, with positions and rotation instead of cosines and sines.

    The rotation is looked up in the called layer, so that a copy uses its own.
    """
    theirs = with_global_replaced(kind.forward, THEIRS, _apply)

    def forward(self: nn.Module, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        (positions, ratio), values = position_embeddings, getattr(self, VALUES, None)
        pair = (positions, (getattr(self, ROTATION), None if ratio is positions else ratio))
        layer: Any = self if values is None else WithRotatedValues(self, values, positions)
        return theirs(layer, *args, position_embeddings=pair, **kwargs)

    return forward


def _apply(
    q: Tensor, k: Tensor, positions: Tensor, of_layer: tuple[RotaryEmbedding, Tensor | None]
) -> Any:
    """Replace ``apply_rotary_pos_emb``, which does not rotate class tokens.

    In GPT-NeoX it rotates only some of the channels. ``of_layer`` is the rotation, and the ratio of
    frequencies that follow the length.
    """
    rotation, ratio = of_layer
    rotate: Any = rotation
    if ratio is not None:
        rotate = functools.partial(rotate_with_ratio, rotation, ratio=ratio)
    dim, prefix = rotation.head_dim, q.shape[-2] - positions.shape[-2]
    if q.shape[-1] == dim:
        return rotate(q, k, positions, num_prefix_tokens=prefix)
    rotated = rotate(q[..., :dim], k[..., :dim], positions, num_prefix_tokens=prefix)
    pairs = zip(rotated, (q, k), strict=True)
    return tuple(torch.cat((part, x[..., dim:]), dim=-1) for part, x in pairs)


def _cosines_of(model: nn.Module, layers: list[nn.Module]) -> tuple[nn.Module, str, Any]:
    """Find the module that computes cosines and sines: its parent, its name, and itself."""
    found = [
        (holder, name, child)
        for holder in model.modules()
        for name, child in holder.named_children()
        if hasattr(child, "inv_freq")
    ]
    if len(found) != 1 or not layers:
        raise ValueError(
            f"model: expected one rotary embedding for all layers of {type(model).__name__}, "
            f"found {len(found)}; is transformers older than 5.0?"
        )
    return found[0]
