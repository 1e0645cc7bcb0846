"""Optimizer and schedule of a run, from timm's factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import shown
from comrope.experiments.common.randomness import seeded
from comrope.experiments.config import Config, Optim
from comrope.experiments.training.state import load_optimizer, optimizer_numbers, optimizer_tensors
from comrope.optim import split_parameters

__all__ = ["create_optimizer", "create_schedule", "parameter_groups", "try_optimizer"]

FUSED = ("adam", "adamw")  # torch's optimizers with one launch per group


def parameter_groups(
    optim: Optim, model: nn.Module, layer_of: Callable[[str], int | None]
) -> list[dict[str, Any]]:
    """Return groups as in ``comrope.parameter_groups``, with "lr_scale" for timm's schedules.

    Args:
        optim: The section ``optim``.
        model: The model.
        layer_of: Function from the name of a parameter to its layer; 0 is before all layers, None
            after them. With ``optim.layer_decay``, every layer has its own groups.
    """
    layers = {id(parameter): layer_of(name) for name, parameter in model.named_parameters()}
    top = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for kind, parameters in split_parameters(model).items():
        for parameter in parameters:
            layer = layers[id(parameter)]
            below = 0 if optim.layer_decay == 1 or layer is None else top - layer
            scale = optim.angle_lr_scale if kind == "angles" else 1.0
            group = groups.setdefault(
                (kind, below),
                {
                    "params": [],
                    "weight_decay": optim.weight_decay if kind == "decayed" else 0.0,
                    "lr_scale": scale * optim.layer_decay**below,
                },
            )
            group["params"].append(parameter)
    return list(groups.values())


def create_optimizer(
    optim: Optim, model: nn.Module, layer_of: Callable[[str], int | None]
) -> torch.optim.Optimizer:
    """Return timm's optimizer ``optim.name`` for a model; see ``parameter_groups``."""
    from timm.optim import create_optimizer_v2

    # With groups for every layer, optimizers that are not fused take longer on the CPU than on the
    # GPU.
    on_gpu = all(parameter.is_cuda for parameter in model.parameters())
    options: dict[str, Any] = {"fused": True} if on_gpu and optim.name in FUSED else {}
    try:
        return create_optimizer_v2(
            parameter_groups(optim, model, layer_of),
            opt=optim.name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            betas=optim.betas,
            **options,
        )
    except (ValueError, AssertionError) as error:
        raise UserError(f"optim.name: {error}, got {shown(optim.name)}") from None


def create_schedule(config: Config, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
    """Return timm's schedule per step; the warm-up is a share of all steps."""
    from timm.scheduler import create_scheduler_v2

    optim, epochs = config.optim, config.train.epochs
    steps = optim.warmup_ratio * epochs * steps_per_epoch
    return create_scheduler_v2(
        optimizer,
        sched=optim.schedule,
        num_epochs=epochs,
        min_lr=optim.min_lr,
        warmup_lr=optim.lr / (steps + 1),  # not zero: the first step counts
        warmup_epochs=optim.warmup_ratio * epochs,  # type: ignore[arg-type]
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )[0]


def try_optimizer(config: Config, device: torch.device) -> None:
    """Take a step with a made-up model, and save and load the state of the optimizer.

    It takes milliseconds and changes no generator.

    Raises:
        UserError: The optimizer or the schedule fails with the fields of this configuration.
    """
    with seeded("try"):
        model = nn.Linear(3, 3).to(device)
    try:
        optimizer = create_optimizer(config.optim, model, lambda name: None)
        create_schedule(config, optimizer, steps_per_epoch=1).step_update(0)
        model(torch.ones(1, 3, device=device)).sum().backward()
        optimizer.step()
        saved = optimizer_tensors(model, optimizer), optimizer_numbers(optimizer)
        load_optimizer(model, optimizer, *saved)
    except UserError:
        raise
    except Exception as error:  # timm's optimizers raise any, without a field
        raise UserError(
            f"optim.name: {shown(config.optim.name)} cannot be used here "
            f"({type(error).__name__}: {error}); expected another one of timm, such as adamw"
        ) from error
