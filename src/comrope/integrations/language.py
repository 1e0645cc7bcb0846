"""Hugging Face's rotary language models.

Their attention is handed cosines and sines (``position_embeddings``) and calls
``apply_rotary_pos_emb(q, k, cos, sin)`` on what is to be turned, before keys are cached. Here the
pair is the positions and the layer's own rotation, and that function calls it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comrope.integrations.rebinding import names_in, rebound
from comrope.rotary import RotaryEmbedding

__all__ = ["LANGUAGE_MODELS", "is_language_model", "swap_language_model", "unswap_language_model"]

LANGUAGE_MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt_neox")
ROTATION = "comrope"  # the name of what each attention layer gets
THEIRS = "apply_rotary_pos_emb"


class TokenPositions(nn.Module):
    """In the place of a model's cosines and sines: positions (B, T, 1), and what was there."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = position_ids.to(device=x.device, dtype=torch.float32)[..., None]
        return positions, positions


class ScaledRotation(RotaryEmbedding):
    """Rotates, and scales q and k as YaRN does: by a number that is one without it."""

    scaling = 1.0

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, **options: Any) -> Any:
        q, k = super().forward(q, k, positions, **options)
        return (q, k) if self.scaling == 1.0 else (q * self.scaling, k * self.scaling)


def is_language_model(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in LANGUAGE_MODELS


def swap_language_model(model: nn.Module, method: str, **options: Any) -> None:
    """Give every attention layer a rotation of its own; ``options`` are RotaryEmbedding's."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    (holder, name, stock), layers = _cosines_of(model), _attention_layers(model)
    options.setdefault("init", "rope")
    if options["init"] == "rope" and "base" not in options:
        options.setdefault("frequencies", stock.inv_freq.tolist())  # type: ignore[operator]
    rotations = [
        ScaledRotation(
            method,
            num_heads=heads,
            head_dim=2 * stock.inv_freq.numel(),  # type: ignore[operator]
            num_axes=1,
            channel_order="half",
            device=next(layer.parameters()).device,
            **options,
        )
        for layer in layers
    ]
    for layer, rotation in zip(layers, rotations, strict=True):  # nothing is changed before here
        rotation.scaling = float(stock.attention_scaling)  # type: ignore[arg-type]
        layer.add_module(ROTATION, rotation)
        forward = _forward_of(type(layer))  # type: ignore[arg-type]
        setattr(layer, _door(layer), types.MethodType(forward, layer))
    setattr(holder, name, TokenPositions(stock))


def unswap_language_model(model: nn.Module) -> None:
    """All as it was before."""
    for layer in _attention_layers(model):
        door = _door(layer)
        if door == "forward":
            del layer.forward
        else:
            setattr(layer, door, types.MethodType(type(layer).forward, layer))
        delattr(layer, ROTATION)
    for holder in model.modules():
        for name, child in list(holder.named_children()):
            if isinstance(child, TokenPositions):
                setattr(holder, name, child.stock)


@functools.cache
def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """A layer's own forward pass, with positions and its rotation for cosines and sines.

    The rotation is looked up on the layer that is called, so that copies of it have their own.
    """
    theirs = rebound(kind.forward, THEIRS, _apply)

    def forward(self: nn.Module, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        pair = (position_embeddings[0], getattr(self, ROTATION))
        return theirs(self, *args, position_embeddings=pair, **kwargs)

    return forward


def _apply(q: Tensor, k: Tensor, positions: Tensor, rotation: RotaryEmbedding) -> Any:
    """In the place of ``apply_rotary_pos_emb``. GPT-NeoX leaves it to it to turn a part alone."""
    dim = rotation.method.head_dim
    if q.shape[-1] == dim:
        return rotation(q, k, positions)
    turned = rotation(q[..., :dim], k[..., :dim], positions)
    pairs = zip(turned, (q, k), strict=True)
    return tuple(torch.cat((part, x[..., dim:]), dim=-1) for part, x in pairs)


def _door(layer: nn.Module) -> str:
    """Where a call arrives: beyond the hooks of Accelerate, which ``device_map`` puts there."""
    return "_old_forward" if "_old_forward" in vars(layer) else "forward"


def _attention_layers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if THEIRS in names_in(type(layer).forward)]


def _cosines_of(model: nn.Module) -> tuple[nn.Module, str, nn.Module]:
    """The module that makes them, its name, and who holds it."""
    found = [
        (holder, name, child)
        for holder in model.modules()
        for name, child in holder.named_children()
        if hasattr(child, "inv_freq") and hasattr(child, "attention_scaling")
    ]
    if len(found) != 1 or not _attention_layers(model):
        raise ValueError(
            f"model: expected one rotary embedding for all layers of {type(model).__name__}, "
            f"found {len(found)}; is transformers older than 5.0?"
        )
    return found[0]
