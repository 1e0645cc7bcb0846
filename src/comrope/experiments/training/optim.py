"""Optimizer and schedule, from timm's factories; mixing, erasing, and the loss to go with them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config
from comrope.methods.comrope_torus import ComRoPETorus
from comrope.optim import split_parameters

__all__ = ["Soften", "create_optimizer", "create_schedule", "parameter_groups"]


BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
FUSED = ("adam", "adamw")  # those of torch that are one launch a group
BEFORE = re.compile(r"(?:^|\.)(?:patches|patch_embed|ape|pos_embed|cls_token|reg_token)\b")
SCHEDULES = ("cosine", "tanh", "poly", "step", "multistep")  # functions of the step alone


def parameter_groups(config: Config, model: nn.Module) -> list[dict[str, Any]]:
    """As ``comrope.parameter_groups``, with the scale of the rate that timm's schedules know; with
    ``optim.layer_decay`` a group for each layer of a kind."""
    optim = config.optim
    layers = {id(parameter): _layer(name) for name, parameter in model.named_parameters()}
    bases = {id(m.P) for m in model.modules() if isinstance(m, ComRoPETorus) and m.block_size > 2}
    top = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    decays = {"decayed": optim.weight_decay, "angles": optim.angle_weight_decay}
    groups: dict[tuple[str, bool, int], dict[str, Any]] = {}
    for kind, parameters in split_parameters(model).items():
        for parameter in parameters:
            layer = layers[id(parameter)]
            below = 0 if optim.layer_decay == 1 or layer is None else top - layer
            scale = optim.angle_lr_scale if kind == "angles" else 1.0
            apart = id(parameter) in bases and optim.basis_lr_scale != 1
            scale *= optim.basis_lr_scale if apart else 1.0
            group = groups.setdefault(
                (kind, apart, below),
                {
                    "params": [],
                    "weight_decay": decays.get(kind, 0.0),
                    "lr_scale": scale * optim.layer_decay**below,
                },
            )
            group["params"].append(parameter)
    return list(groups.values())


def _layer(name: str) -> int | None:
    """The layer of a parameter of a ViT, or of what stands on one: 0 of what comes before its
    blocks, None of what comes after them."""
    if found := BLOCK.search(name):
        return 1 + int(found[1])
    return 0 if BEFORE.search(name) else None


def create_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2

    optim = config.optim
    # One launch a group: with a group for every layer, others keep the CPU busier than the GPU.
    on_gpu = all(parameter.is_cuda for parameter in model.parameters())
    options: dict[str, Any] = {"fused": True} if on_gpu and optim.name in FUSED else {}
    try:
        return create_optimizer_v2(
            parameter_groups(config, model),
            opt=optim.name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            betas=optim.betas,
            **options,
        )
    except (ValueError, AssertionError) as error:
        raise UserError(f"optim.name: {error}, got {optim.name!r}") from None


def create_schedule(config: Config, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
    """timm's schedule, a function of the step; the warm-up is a share of the whole."""
    from timm.scheduler import create_scheduler_v2

    optim, epochs = config.optim, config.train.epochs
    steps = optim.warmup_ratio * epochs * steps_per_epoch
    if optim.schedule not in SCHEDULES:
        raise UserError(
            f"optim.schedule: expected one of {', '.join(SCHEDULES)}, got {optim.schedule!r}"
        )
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


class Soften:
    """What makes targets soft and images incomplete: mixup, cutmix, smoothing, random erasing."""

    def __init__(self, config: Config) -> None:
        from timm.data import Mixup
        from timm.data.random_erasing import RandomErasing

        augment = config.augment
        self.smoothing = augment.smoothing
        self.mix = None
        if augment.mixup or augment.cutmix:
            self.mix = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                label_smoothing=augment.smoothing,
                num_classes=config.data.num_classes,
            )
        self.erasing = augment.erase
        self.eraser = RandomErasing

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.erasing:
            eraser = self.eraser(self.erasing, mode="pixel", device=images.device)
            images = eraser(images)
        if self.mix is not None:
            if len(images) % 2:
                raise UserError(
                    "augment.mixup: mixes pairs, so every process needs an even number of images "
                    f"a part; got {len(images)}"
                )
            images, targets = self.mix(images, targets)
        return images, targets

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = 0.0 if self.mix is not None else self.smoothing  # mixed in already
        return nn.functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
