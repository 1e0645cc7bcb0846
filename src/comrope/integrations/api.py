"""``swap`` and ``unswap``: put learned rotations into existing models, and remove them."""

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
    POSITIONS,
    VISION_MODELS,
    is_vision_model,
    swap_vision_model,
)
from comrope.integrations.rebinding import ROTATION, VALUES, restore_forward
from comrope.integrations.timm_vit import (
    TIMM_MODELS,
    RotateKeys,
    RotateQueries,
    WithoutRope,
    is_timm_model,
    swap_timm_model,
)
from comrope.integrations.token_positions import TokenPositions
from comrope.methods import method_class

__all__ = ["FOLDED", "check_weights", "swap", "take_out", "unswap"]

Model = TypeVar("Model", bound=nn.Module)
# The oldest supported versions: models of older ones have another structure.
OLDEST = {"language": "5.0", "vision": "5.17", "timm": "1.0.29"}
FOLDED = "is_folded"  # attribute of rotations whose bases were folded into weights
HOOKS = (TokenPositions, RotateQueries, RotateKeys, WithoutRope)
APE = re.compile(r"(?:^|\.)(?:pos_embed(?:_[xy])?|position_embeddings|position_embedding\.weight)$")
TEXT = re.compile(r"(?:^|\.)text_model\.")


def swap(
    model: Model,
    method: str = "comrope-ld",
    *,
    ape: str = "keep",
    class_position: str | None = None,
    perturbation: float = 0.0,
    rotate_values: bool = False,
    **options: Any,
) -> Model:
    """Put a learned rotation into every attention layer of a model, in place.

    Args:
        model: A model of timm (``TIMM_MODELS`` and subclasses), or of transformers with a
            ``model_type`` in ``ROTATING_MODELS`` or ``VISION_MODELS``; with or without a head,
            pretrained or not.
        method: One of ``comrope.METHODS``.
        ape: What happens to the absolute positions of a vision model: ``"keep"``, or ``"drop"``,
            which sets them to zero and freezes them.
        class_position: Position of class tokens and registers: ``"center"`` of the image, or
            ``"unrotated"``; by default the latter in models that already rotate.
        perturbation: Standard deviation of the perturbation of positions in training, in patches,
            for vision models.
        rotate_values: Rotate values too, and the outputs of attention back, for language models
            with a ``v_proj``. These rotations are modules of their own, ``comrope_values``, and
            start at zero: outputs stay the same.
        options: Options of ``comrope.RotaryEmbedding``: ``block_size``, ``backend`` and so on.
            ``init`` is by default ``"rope"`` with the model's own frequencies if the model already
            rotates, and ``"zeros"`` otherwise: outputs stay the same.

    Returns:
        The model. Its weights keep their names; each attention layer has an additional module
        ``comrope``, which should have no weight decay.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The model is not supported, or is compiled or wrapped. The model is unchanged.
    """
    _checks.one_of("ape", ape, ("keep", "drop"))
    _check_model(model)
    check_weights(model)
    if rotary_modules(model):
        raise ValueError("model: has learned rotations already; remove them with comrope.unswap")
    vision = {"class_position": class_position, "perturbation": perturbation}
    if is_rotating_model(model):
        if ape != "keep" or class_position is not None or perturbation:
            raise ValueError(
                "ape, class_position, perturbation: expected none of these for a model of "
                f"transformers that already rotates ({type(model).__name__})"
            )
        is_vision = model.config.model_type.startswith("dinov3")  # type: ignore[union-attr, operator]
        _check_version("transformers", OLDEST["vision" if is_vision else "language"])
        if is_vision and rotate_values:
            raise _no_rotated_values(model)
        swap_rotating_model(model, method, rotate_values=rotate_values, **options)
        return model
    if rotate_values:
        raise _no_rotated_values(model)
    starts_at_zero = options.get("init", "zeros") == "zeros" and not hasattr(model, "rope")
    if starts_at_zero and not method_class(method).starts_at_zero:
        raise ValueError(
            f"method: {method!r} cannot start at zero, which would keep the outputs; expected "
            "another method, or init='rope' with position_scale"
        )
    if is_vision_model(model):
        _check_version("transformers", OLDEST["vision"])
        positions = swap_vision_model(model, method, **vision, **options)  # type: ignore[arg-type]
    elif is_timm_model(model):
        _check_version("timm", OLDEST["timm"])
        positions = swap_timm_model(model, method, **vision, **options)  # type: ignore[arg-type]
    else:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"model: {kind!r} is not supported; expected one of timm's {', '.join(TIMM_MODELS)} or "
            "a model of transformers of type "
            f"{', '.join((*ROTATING_MODELS, *VISION_MODELS))}"
        )
    positions.disable(_unused(model, ape == "drop"))
    return model


def _no_rotated_values(model: nn.Module) -> ValueError:
    return ValueError(
        "rotate_values: expected False, since only language models of transformers support it, for "
        f"{type(model).__name__}"
    )


def unswap(model: Model) -> Model:
    """Remove what ``swap`` added, in place. The learned rotations are lost."""
    if any(getattr(rotation, FOLDED, False) for rotation in rotary_modules(model).values()):
        raise ValueError("model: was folded, which changed its weights; it cannot be undone")
    return take_out(model)


def take_out(model: Model) -> Model:
    """Remove what ``swap`` added, in place, also if the weights were folded."""
    layers = [part for part in model.modules() if ROTATION in dict(part.named_children())]
    if not layers:
        raise ValueError(f"model: {type(model).__name__} has no rotation that comrope.swap added")
    parameters = dict(model.named_parameters())
    for part in model.modules():
        for hook in part._forward_hooks.values():
            if isinstance(hook, TokenPositions):
                hook.check_restorable(parameters)
    for layer in layers:  # the model is unchanged up to here
        restore_forward(layer)
        delattr(layer, ROTATION)
        if hasattr(layer, VALUES):
            delattr(layer, VALUES)
    for part in model.modules():
        for positions in _remove_hooks(part):
            positions.restore(dict(model.named_parameters()))
        for name, child in list(part.named_children()):
            if isinstance(child, Positions):
                setattr(part, name, child.stock)
    return model


def _check_model(model: Any) -> None:
    """Raise unless ``model`` is a plain module: created, and not compiled or wrapped."""
    if not isinstance(model, nn.Module):
        hint = "; create it first, such as by timm.create_model" if isinstance(model, str) else ""
        raise TypeError(f"model: expected a module, got {model!r:.80}{hint}")
    wrapped = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    inner = "_orig_mod" if hasattr(model, "_orig_mod") else "module"
    if inner == "_orig_mod" or isinstance(model, wrapped):
        raise ValueError(
            f"model: expected a model that is not compiled or wrapped yet, got "
            f"{type(model).__name__}; swap first, or pass model.{inner}"
        )


def check_weights(model: nn.Module) -> None:
    """Raise unless all weights have values."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "model: expected weights with values, got some on the meta device (offloaded, or not "
            "loaded yet)"
        )


def _check_version(package: str, oldest: str) -> None:
    found = sys.modules[package].__version__
    if TorchVersion(found) < oldest:  # it compares versions of any package
        raise ImportError(
            f"comrope.swap needs {package} {oldest} or newer for this model, found {found}: "
            f"pip install -U {package}"
        )


def _unused(model: nn.Module, drop_ape: bool) -> dict[str, nn.Parameter]:
    """Return parameters that the model no longer uses: timm's RoPE-Mixed, and dropped APE."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith("rope.") or (drop_ape and APE.search(name) and not TEXT.search(name))
    }


def _remove_hooks(part: nn.Module) -> list[TokenPositions]:
    """Remove our hooks from a module, and return the positions among them."""
    found = []
    for hooks in (part._forward_hooks, part._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, HOOKS):
                del hooks[key]
                part._forward_hooks_with_kwargs.pop(key, None)
                part._forward_pre_hooks_with_kwargs.pop(key, None)
                found += [hook] if isinstance(hook, TokenPositions) else []
    vars(part).pop(POSITIONS, None)
    return found
