"""The two doors: ``swap`` and ``unswap``."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from comrope.analysis import rotary_modules
from comrope.integrations.language import (
    LANGUAGE_MODELS,
    is_language_model,
    swap_language_model,
    unswap_language_model,
)

__all__ = ["swap", "unswap"]

Model = TypeVar("Model", bound=nn.Module)


def swap(model: Model, method: str = "comrope-ld", **options: Any) -> Model:
    """Put a rotation that learns into every attention layer of a model, in place.

    Args:
        model: A rotary language model of transformers (``LANGUAGE_MODELS``), with or without a
            head, from ``from_pretrained`` or built anew.
        method: One of ``comrope.METHODS``.
        options: Of ``comrope.RotaryEmbedding``: ``block_size``, ``backend`` and so on. ``init`` is
            ``"rope"`` unless said otherwise: the model's own frequencies, as it scales them, so
            that its outputs are what they were.

    Returns:
        The model. Its weights keep their names; each attention layer has a module ``comrope`` more,
        which an optimizer should not decay. Frequencies that a model would change with the length
        of its input ("dynamic", "longrope") stay as they are now.
    """
    if not is_language_model(model):
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"model: {kind!r} is not supported; expected a model of transformers of type "
            f"{', '.join(LANGUAGE_MODELS)}"
        )
    if rotary_modules(model):
        raise ValueError("model: it has learned rotations already; comrope.unswap takes them out")
    swap_language_model(model, method, **options)
    return model


def unswap(model: Model) -> Model:
    """Take out what ``swap`` put in; the model is as it was, what was learned is gone."""
    if not rotary_modules(model) or not is_language_model(model):
        raise ValueError(f"model: this {type(model).__name__} has nothing that comrope.swap put in")
    unswap_language_model(model)
    return model
