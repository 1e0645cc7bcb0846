"""Initial weights from a run or from timm: ``train.start_from``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comrope._checks import nonfinite
from comrope._weights import misfits, shapes_of
from comrope.experiments.common.distributed import shard_like
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import TIMM, Config, Model
from comrope.experiments.runs.directory import read_weights
from comrope.experiments.tasks.build import pretrained_weights

__all__ = [
    "ANGLE_KEYS",
    "InitReport",
    "check_finite",
    "check_fit",
    "check_names",
    "fit_weights",
    "init_from_weights",
    "load_weights",
]

ANGLE_KEYS = re.compile(r"\.(rope|comrope)\.method\.\w+$")
HEAD_KEYS = re.compile(r"(^|\.)head\.(weight|bias)$")
APE_KEYS = re.compile(r"(^|\.)(ape\.codebook|pos_embed)$")


class InitReport(NamedTuple):
    """How the initial weights of a model were set."""

    start: str  # train.start_from
    new: list[str]  # tensors that keep their initialization
    left_out: list[str]  # tensors that the model does not have

    def note(self) -> str | None:
        """Return a line to print, or None."""
        if any(map(APE_KEYS.search, self.left_out)):
            return f"the absolute positions of {self.start} are not used; model.ape=true keeps them"
        return None


class Start(NamedTuple):
    """Weights to start from, and the settings that they were trained with."""

    tensors: dict[str, Tensor]
    model: Model
    num_classes: int
    frames: int


def init_from_weights(
    model: nn.Module, config: Config, *, unused: Collection[str] = ()
) -> InitReport:
    """Load ``train.start_from``, weights of a run or of timm, into a ViT, sharded or not.

    - Angles keep their initialization if the run has another method or other axes.
    - The head keeps its initialization if the number of classes differs.
    - Absolute positions and angles of the run may be left out, and the names in ``unused``.

    Raises:
        UserError: Other weights do not fit.
    """
    start = _read_start(config)
    own, mine = model.state_dict(), config.model
    new = set()
    # Angles may fit by shape on other axes, but they have another meaning there.
    if start.model.position != mine.position or bool(start.frames) != bool(config.data.frames):
        new |= {name for name in own if ANGLE_KEYS.search(name)}
    elif start.model.rotate_values != mine.rotate_values:
        raise UserError(
            f"model.rotate_values: expected {start.model.rotate_values} as in "
            f"{config.train.start_from}, whose angles are kept; got {mine.rotate_values}"
        )
    if mine.locality_bias not in (0, start.model.locality_bias):
        raise UserError(
            f"model.locality_bias: expected 0, since the biases of {config.train.start_from} are "
            f"kept; got {mine.locality_bias:g}"
        )
    if start.num_classes != config.data.num_classes:
        new |= {name for name in own if HEAD_KEYS.search(name)}

    def may_be_left_out(name: str) -> bool:
        return name in unused or bool(APE_KEYS.search(name) or ANGLE_KEYS.search(name))

    return fit_weights(
        model, start.tensors, str(config.train.start_from), new=new, optional=may_be_left_out
    )


@torch.no_grad()
def fit_weights(
    model: nn.Module,
    tensors: dict[str, Tensor],
    start: str,
    *,
    new: Collection[str] = (),
    optional: Callable[[str], bool] = lambda name: False,
) -> InitReport:
    """Copy tensors into a model, sharded or not, by name.

    Args:
        model: The model. Its frozen parameters, such as absolute positions that a timm model no
            longer uses, keep their values.
        tensors: The tensors by name.
        start: The origin of the tensors, for messages.
        new: Names in the model that keep their initialization.
        optional: Function from the name of a tensor that the model does not have to whether it may
            be left out.

    Raises:
        UserError: Some tensors do not fit.
    """
    own = model.state_dict()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    wanted = {name: tensor for name, tensor in own.items() if name not in {*new} | frozen}
    left_out = sorted(set(tensors) - set(own) | frozen & set(tensors))
    skipped = {*new} | {name for name in left_out if optional(name)}
    offered = {name: tensor for name, tensor in tensors.items() if name not in skipped}
    check_fit(f"train.start_from: {start}", wanted, offered)
    for name, tensor in wanted.items():
        tensor.copy_(shard_like(tensors[name], tensor))
    return InitReport(start, sorted(new), left_out)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Copy tensors into a model, sharded or not; all names must fit. ``where`` is for messages."""
    own = model.state_dict()
    check_fit(where, own, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(shard_like(tensors[name], tensor))


def check_fit(where: str, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise unless tensors have the names, shapes and dtypes of those of a model.

    Args:
        where: The origin of the tensors, for messages.
        own: The tensors of the model by name.
        tensors: Those to load.
    """
    wrong = misfits(shapes_of(own), shapes_of(tensors))
    wrong += [
        f"{name} has dtype {tensors[name].dtype}, expected {tensor.dtype}"
        for name, tensor in own.items()
        if name in tensors and tensors[name].dtype != tensor.dtype
    ]
    check_names(where, wrong)


def check_names(where: str, wrong: list[str]) -> None:
    """Raise if some tensors do not fit, naming the first three."""
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(
            f"{where} does not fit: {'; '.join(wrong[:3])}{more}. Restore them, or choose weights "
            "of the model in the configuration"
        )


def check_finite(start: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise if some initial weights are not finite."""
    if wrong := nonfinite(tensors):
        raise UserError(
            f"train.start_from: {start}: {wrong[0]} has values that are not finite; expected other "
            "weights"
        )


def _read_start(config: Config) -> Start:
    start = config.train.start_from
    if not start:
        raise UserError("train.start_from: not given; expected the folder of a run")
    if start.startswith(TIMM):
        tensors, classes = pretrained_weights(config, start)
        check_finite(start, tensors)
        return Start(tensors, Model(name=start, position="ape"), classes, 0)
    theirs, tensors = read_weights(Path(start), "train.start_from")
    if config.data.holdout not in (0.0, theirs.data.holdout):
        raise UserError(
            f"data.holdout: expected {theirs.data.holdout:g} as in {start}, or 0, got "
            f"{config.data.holdout:g}, which contains its training images"
        )
    return Start(tensors, theirs.model, theirs.data.num_classes, theirs.data.frames)
