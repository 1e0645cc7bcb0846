"""Parameter groups of models with learned rotations."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from comrope import _checks
from comrope.analysis import rotary_modules

__all__ = ["parameter_groups", "split_parameters"]


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    lr: float | None = None,
    angle_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: angles without decay, with their own learning rate.

    Args:
        model: Any model that contains a ``RotaryEmbedding``: ours, a swapped one or your own.
        weight_decay: Of the weights. Angles, biases, norms, parameters with one dimension or none,
            and those that a module's ``no_weight_decay()`` names have none.
        lr: Learning rate of all other parameters; by default the optimizer's own.
        angle_lr: Learning rate of the angles, by default ``lr``. Adam changes an element by about
            its learning rate per step, so angles that start at zero need a higher one if there are
            few steps.

    Returns:
        At most three groups, for ``torch.optim.AdamW(groups)``. Frozen parameters are left out.
    """
    decay = _checks.real("weight_decay", weight_decay)
    rate = None if lr is None else _checks.real("lr", lr)
    angle_rate = rate if angle_lr is None else _checks.real("angle_lr", angle_lr)
    groups = []
    for name, parameters in split_parameters(model).items():
        group = {"params": parameters, "weight_decay": decay if name == "decayed" else 0.0}
        own = angle_rate if name == "angles" else rate
        groups.append(group if own is None else {**group, "lr": own})
    return groups


def split_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Split trainable parameters into ``decayed``, ``spared`` (no decay) and ``angles``.

    Empty lists are left out.
    """
    angles = {id(p) for module in rotary_modules(model).values() for p in module.parameters()}
    spared = {  # patterns, as timm reads them
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if callable(names := getattr(module, "no_weight_decay", None))
        for name in names()
    }
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "spared": [], "angles": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in angles:
            groups["angles"].append(parameter)
        elif parameter.ndim <= 1 or any(fnmatchcase(name, pattern) for pattern in spared):
            groups["spared"].append(parameter)
        else:
            groups["decayed"].append(parameter)
    return {name: parameters for name, parameters in groups.items() if parameters}
