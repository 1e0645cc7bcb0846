"""The two doors: ``swap`` and ``unswap``."""

from __future__ import annotations

import re
import sys
from typing import Any, TypeVar

from torch import nn
from torch.torch_version import TorchVersion

from comrope import _checks
from comrope.analysis import rotary_modules
from comrope.integrations.hf_rotary import (
    ROTATING_MODELS,
    Positions,
    is_rotating_model,
    swap_rotating_model,
)
from comrope.integrations.hf_vision import (
    PLACES,
    VISION_MODELS,
    is_vision_model,
    swap_vision_model,
)
from comrope.integrations.rebinding import ROTATION, restore_forward
from comrope.integrations.timm_vit import (
    TIMM_MODELS,
    TurnedKeys,
    TurnedQueries,
    Unrotated,
    is_timm_model,
    swap_timm_model,
)
from comrope.integrations.token_positions import Places

__all__ = ["FOLDED", "check_weights", "swap", "take_out", "unswap"]

Model = TypeVar("Model", bound=nn.Module)
# What the ways in were made for; older ones are laid out differently.
OLDEST = {"language": "5.0", "vision": "5.17", "timm": "1.0.29"}
FOLDED = "is_folded"  # the mark of a rotation whose basis has gone into weights
HOOKS = (Places, TurnedQueries, TurnedKeys, Unrotated)
APE = re.compile(r"(?:^|\.)(?:pos_embed(?:_[xy])?|position_embeddings|position_embedding\.weight)$")
TEXT = re.compile(r"(?:^|\.)text_model\.")


def swap(
    model: Model,
    method: str = "comrope-ld",
    *,
    ape: str = "keep",
    class_position: str | None = None,
    perturbation: float = 0.0,
    **options: Any,
) -> Model:
    """Put a rotation that learns into every attention layer of a model, in place.

    Args:
        model: One of timm (``TIMM_MODELS`` and their variants) or of transformers, of one of the
            types ``ROTATING_MODELS`` and ``VISION_MODELS``; with or without a head, from
            ``from_pretrained`` or built anew.
        method: One of ``comrope.METHODS``.
        ape: What becomes of the absolute positions of a vision model: ``"keep"``, or ``"drop"``,
            set to zero and frozen.
        class_position: Of class tokens and registers: ``"center"`` of the image, or
            ``"unrotated"``; by default the latter in models that rotate already.
        perturbation: The paper's noise on positions in training, in patches, for vision models.
        options: Of ``comrope.RotaryEmbedding``: ``block_size``, ``backend`` and so on. ``init`` is
            by default ``"rope"`` where the model rotates already, its own frequencies as it scales
            them, and ``"zeros"`` where it does not: outputs are what they were.

    Returns:
        The model. Its weights keep their names; each attention layer has a module ``comrope`` more,
        which an optimizer should not decay.

    Raises:
        ValueError: The model is not supported, or computes its frequencies from the length of each
            input (``rope_type`` "dynamic" and "longrope"). The model is unchanged.
    """
    _checks.one_of("ape", ape, ("keep", "drop"))
    check_weights(model)
    if rotary_modules(model):
        raise ValueError("model: it has learned rotations already; comrope.unswap takes them out")
    seen = {"class_position": class_position, "perturbation": perturbation}
    if is_rotating_model(model):
        if ape != "keep" or class_position is not None or perturbation:
            raise ValueError(
                "ape, class_position, perturbation: expected none of these for a model of "
                f"transformers that rotates already ({type(model).__name__})"
            )
        looks = model.config.model_type.startswith("dinov3")  # type: ignore[union-attr, operator]
        _check_version("transformers", OLDEST["vision" if looks else "language"])
        swap_rotating_model(model, method, **options)
        return model
    if method == "rope" and options.get("init", "zeros") == "zeros" and not hasattr(model, "rope"):
        raise ValueError(
            "method: 'rope' learns nothing, so there is nothing that could start at zero; expected "
            "another method, or init='rope' with position_scale"
        )
    if is_vision_model(model):
        _check_version("transformers", OLDEST["vision"])
        places = swap_vision_model(model, method, **seen, **options)  # type: ignore[arg-type]
    elif is_timm_model(model):
        _check_version("timm", OLDEST["timm"])
        places = swap_timm_model(model, method, **seen, **options)  # type: ignore[arg-type]
    else:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"model: {kind!r} is not supported; expected one of timm's {', '.join(TIMM_MODELS)} or "
            "a model of transformers of type "
            f"{', '.join((*ROTATING_MODELS, *VISION_MODELS))}"
        )
    places.put_away(_unused(model, ape == "drop"))
    return model


def unswap(model: Model) -> Model:
    """Take out what ``swap`` put in; the model is as it was, what was learned is gone."""
    if any(getattr(rotation, FOLDED, False) for rotation in rotary_modules(model).values()):
        raise ValueError("model: it was folded, and its weights with it: there is no way back")
    return take_out(model)


def take_out(model: Model) -> Model:
    """``unswap``, whatever the weights are."""
    layers = [part for part in model.modules() if ROTATION in dict(part.named_children())]
    if not layers:
        raise ValueError(f"model: this {type(model).__name__} has nothing that comrope.swap put in")
    parameters = dict(model.named_parameters())
    for part in model.modules():
        for hook in part._forward_hooks.values():
            if isinstance(hook, Places):
                hook.check_way_back(parameters)
    for layer in layers:  # nothing is changed before here
        restore_forward(layer)
        delattr(layer, ROTATION)
    for part in model.modules():
        for places in _take_hooks(part):
            places.bring_back(dict(model.named_parameters()))
        for name, child in list(part.named_children()):
            if isinstance(child, Positions):
                setattr(part, name, child.stock)
    return model


def check_weights(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "model: expected weights that are there, got some on the meta device (offloaded, or "
            "not loaded yet)"
        )


def _check_version(package: str, oldest: str) -> None:
    found = sys.modules[package].__version__
    if TorchVersion(found) < oldest:  # which compares versions, whose they are
        raise ImportError(
            f"comrope.swap needs {package} {oldest} or newer for this model, found {found}: "
            f"pip install -U {package}"
        )


def _unused(model: nn.Module, drop_ape: bool) -> dict[str, nn.Parameter]:
    """Parameters that are not used any more, by name: what timm's RoPE-Mixed has learned, APE."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith("rope.") or (drop_ape and APE.search(name) and not TEXT.search(name))
    }


def _take_hooks(part: nn.Module) -> list[Places]:
    """Take our hooks off a module; the places that were among them."""
    found = []
    for hooks in (part._forward_hooks, part._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, HOOKS):
                del hooks[key]
                part._forward_hooks_with_kwargs.pop(key, None)
                part._forward_pre_hooks_with_kwargs.pop(key, None)
                found += [hook] if isinstance(hook, Places) else []
    vars(part).pop(PLACES, None)
    return found
