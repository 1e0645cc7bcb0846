"""Hugging Face's vision models with absolute positions: ViT, CLIP, SigLIP, DINOv2.

Their attention layers look up the attention function of the configuration (eager, SDPA,
FlashAttention) in ``ALL_ATTENTION_FUNCTIONS``, and call it with the layer, queries, keys and
values. Here they get a function that rotates queries and keys first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from comrope.integrations.rebinding import (
    ROTATION,
    names_in,
    replace_forward,
    with_global_replaced,
)
from comrope.integrations.token_positions import TokenPositions
from comrope.rotary import RotaryEmbedding

__all__ = ["POSITIONS", "VISION_MODELS", "is_vision_model", "swap_vision_model"]

# ``model_type`` of their configurations; some have a text model too.
VISION_MODELS = (
    "vit", "clip", "clip_vision_model", "siglip", "siglip_vision_model", "dinov2",
    "dinov2_with_registers",
)  # fmt: skip
POSITIONS = "comrope_places"  # attribute of attention layers; pickles contain this name
THEIRS = "ALL_ATTENTION_FUNCTIONS"


class AttentionFunctions:
    """Replacement of ``ALL_ATTENTION_FUNCTIONS`` that adds a rotation to each function."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def get_interface(self, *args: Any) -> Callable[..., Any]:
        return functools.partial(_rotate_and, self.stock.get_interface(*args))


def _rotate_and(
    attend: Callable[..., Any], layer: Any, q: Tensor, k: Tensor, *args: Any, **options: Any
) -> Any:
    positions, prefix = getattr(layer, POSITIONS).at(q.shape[-2])
    q, k = getattr(layer, ROTATION)(q, k, positions, num_prefix_tokens=prefix)
    return attend(layer, q, k, *args, **options)


def is_vision_model(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in VISION_MODELS


def _attention_layers(model: nn.Module) -> list[nn.Module]:
    """Find the attention layers of the vision model, not those of a text model."""
    parts = (part for name, part in model.named_modules() if name.endswith("vision_model"))
    layers = next(parts, model).modules()
    return [layer for layer in layers if THEIRS in names_in(type(layer).forward)]


def swap_vision_model(
    model: nn.Module,
    method: str,
    *,
    class_position: str | None = None,
    perturbation: float = 0.0,
    **options: Any,
) -> TokenPositions:
    """Give every attention layer a rotation; ``options`` are those of ``RotaryEmbedding``."""
    layers: list[Any] = _attention_layers(model)
    patches = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if not layers or patches is None:
        raise ValueError(
            f"model: found {len(layers)} attention layers and "
            f"{'no' if patches is None else 'a'} patch embedding in {type(model).__name__}; is "
            "transformers older than 5.0?"
        )
    options.setdefault("init", "zeros")
    positions = TokenPositions(
        class_position="center" if class_position is None else class_position,
        perturbation=perturbation,
        prefix=_prefix_of(layers[0].config),
    )
    rotations = []
    for layer in layers:
        config = layer.config
        rotations.append(
            RotaryEmbedding(
                method,
                num_heads=config.num_attention_heads,
                head_dim=config.hidden_size // config.num_attention_heads,
                num_axes=2,
                device=next(layer.parameters()).device,
                **options,
            )
        )
    for layer, rotation in zip(layers, rotations, strict=True):  # the model is unchanged up to here
        layer.add_module(ROTATION, rotation.train(layer.training))
        setattr(layer, POSITIONS, positions)
        replace_forward(layer, _forward_of)
    patches.register_forward_hook(positions, with_kwargs=True)
    return positions


def _prefix_of(config: Any) -> int:
    """Count class tokens and registers. SigLIP has neither."""
    return 0 if "siglip" in config.model_type else 1 + getattr(config, "num_register_tokens", 0)


@functools.cache
def _forward_of(kind: Any) -> Callable[..., Any]:
    stock = inspect.unwrap(kind.forward).__globals__[THEIRS]
    return with_global_replaced(kind.forward, THEIRS, AttentionFunctions(stock))
