"""Fine-tuning: the weights of a finished run as the start of another."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comrope.experiments.common.distributed import like
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import TIMM, Config, Model
from comrope.experiments.runs.directory import read_weights
from comrope.experiments.tasks.build import pretrained_weights

__all__ = ["ANGLES", "APE", "OF_A_CLASSIFIER", "begin_with", "refuse_misfits"]

ANGLES = re.compile(r"\.(rope|comrope)\.method\.\w+$")
HEAD = re.compile(r"(^|\.)head\.(weight|bias)$")
OF_A_CLASSIFIER = ("cls_token", "head.weight", "head.bias")  # which a detector has no use for
APE = re.compile(r"(^|\.)(ape\.codebook|pos_embed)$")


@torch.no_grad()
def begin_with(model: nn.Module, config: Config, *, unused: Collection[str] = ()) -> dict[str, Any]:
    """Fill a model, sharded or not, with the weights of ``train.start_from``: a run's, or timm's.

    The angles of another method than the run's, or of other axes, stay as they are, and the head
    for another number of classes; the run's own absolute positions and angles may be left out, and
    what is ``unused``. Anything else that does not fit is an error. Returns where it started, what
    is new and what was left out.
    """
    tensors, theirs, classes, frames = _weights(config)
    own = model.state_dict()
    # Absolute positions that a model of timm does not use any more.
    away = {name for name, p in model.named_parameters() if not p.requires_grad}
    new = set()
    # On other axes than they were trained for, angles that happen to fit mean something else.
    if theirs.position != config.model.position or bool(frames) != bool(config.data.frames):
        new |= {name for name in own if ANGLES.search(name)}
    elif theirs.rotate_values != config.model.rotate_values:
        raise UserError(
            f"model.rotate_values: expected {theirs.rotate_values}, that of "
            f"{config.train.start_from}, whose angles are kept; got {config.model.rotate_values}"
        )
    if config.model.locality_bias not in (0, theirs.locality_bias):
        raise UserError(
            f"model.locality_bias: expected 0, since the biases of {config.train.start_from} are "
            f"kept; got {config.model.locality_bias:g}"
        )
    if classes != config.data.num_classes:
        new |= {name for name in own if HEAD.search(name)}
    taken = {name: tensor for name, tensor in own.items() if name not in new | away}
    left_out = sorted(set(tensors) - set(own) | away & set(tensors))
    spare = [name for name in left_out if name not in unused]
    refuse_misfits(str(config.train.start_from), _misfits(taken, tensors, spare))
    for name, tensor in taken.items():
        tensor.copy_(like(tensors[name], tensor))
    return {"start": config.train.start_from, "new": sorted(new), "left_out": left_out}


def refuse_misfits(start: str, wrong: list[str]) -> None:
    """Raise if there are some, naming a few."""
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"train.start_from: {start} does not fit: {'; '.join(wrong[:3])}{more}")


def _weights(config: Config) -> tuple[dict[str, Tensor], Model, int, int]:
    """Tensors by name; the model that they were trained in, and how many classes and frames."""
    start = config.train.start_from
    if not start:
        raise UserError("train.start_from: not given; say which run to start from")
    if start.startswith(TIMM):
        tensors, classes = pretrained_weights(config, start)
        return tensors, Model(name=start, position="ape"), classes, 0
    theirs, tensors = read_weights(Path(start), "train.start_from")
    if config.data.holdout not in (0.0, theirs.data.holdout):
        raise UserError(
            f"data.holdout: expected {theirs.data.holdout:g}, that of {start}, or 0, got "
            f"{config.data.holdout:g}: it was trained on some of those images"
        )
    return tensors, theirs.model, theirs.data.num_classes, theirs.data.frames


def _misfits(
    wanted: dict[str, Tensor], tensors: dict[str, Tensor], left_out: list[str]
) -> list[str]:
    found = []
    for name, tensor in wanted.items():
        if name not in tensors:
            found.append(f"{name} is missing")
        elif tensors[name].shape != tensor.shape:
            shapes = tuple(tensors[name].shape), tuple(tensor.shape)
            found.append(f"{name} has shape {shapes[0]}, expected {shapes[1]}")
    for name in left_out:
        if not APE.search(name) and not ANGLES.search(name):
            found.append(f"{name} has no place")
    return found
