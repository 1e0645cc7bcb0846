"""Checks of a configuration that several tasks share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.memory import require_memory
from comrope.experiments.common.messages import shown
from comrope.experiments.config import TIMM, Config

__all__ = [
    "check_axes",
    "check_images",
    "check_memory",
    "check_policy",
    "refuse_clips",
    "require_defaults",
]

NAME = re.compile(
    rf"(comrope_)?vit_[a-z]+_patch(?P<patch>\d{{1,5}})_(?P<size>\d{{1,5}})|{TIMM}\w+(\.\w+)?",
    re.ASCII,
)
# timm ignores settings of another form. Thousands of operations would take seconds per image.
POLICY = re.compile(r"[a-z0-9]+(-(t[a-z]\w*|[a-z]+\d{1,3}(\.\d{1,6})?))*", re.ASCII)


def check_images(config: Config) -> None:
    """Raise unless the fields that all tasks with images and ViTs share are valid."""
    name = config.model.name
    match = NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"model.name: expected vit_SIZE_patchP_RESOLUTION or timm:NAME, got {shown(name)}"
        )
    size, patch = int(match["size"] or 1), int(match["patch"] or 1)
    if not 0 < patch <= size or size % patch:
        raise UserError(
            "model.name: expected a resolution that is a multiple of the patch size, got "
            f"{shown(name)}"
        )
    data = config.data
    if not len(data.mean) == len(data.std) == data.in_chans:
        raise UserError(
            f"data.mean: expected {data.in_chans} values (data.in_chans), as for data.std, got "
            f"{len(data.mean)} and {len(data.std)}"
        )


def check_memory(config: Config, vit: Any, view: Any, training_view: Any, label: str) -> None:
    """Raise unless the memory may suffice for one sample of a view.

    Args:
        config: The configuration.
        vit: The model.
        view: The view; ``view.size`` is its number of pixels.
        training_view: The view that ``label`` decides; ``evaluate.resolutions`` decides the others.
        label: A field, for the message.
    """
    tokens = view.size // math.prod(vit.patches.patch_size)
    # The pixels, and of one block the tokens, and twice the hidden layer, which is four times as
    # wide, in half precision.
    needed = 4 * config.data.in_chans * view.size + (4 + 2 * 4 * 2) * vit.num_features * tokens
    where = label if view == training_view else "evaluate.resolutions"
    what = f"one sample at {view.resolution} pixels"
    require_memory(needed, where, what, config.train.device)


def check_policy(policy: str | None) -> None:
    """Raise unless a policy of auto-augmentation has the form of timm's."""
    if policy and not POLICY.fullmatch(policy):
        raise UserError(
            "augment.auto_augment: expected a policy of timm with numbers up to 999, such as "
            f"rand-m9-mstd0.5-inc1, got {shown(policy)}"
        )


def check_axes(config: Config, num_axes: int) -> None:
    """Raise unless the fields for axes fit the number of axes."""
    if len(config.model.axis_scale) not in (0, num_axes):
        raise UserError(
            f"model.axis_scale: expected {num_axes} numbers, got {config.model.axis_scale}"
        )
    if any(axis not in range(num_axes) for axis in config.train.perturbation_axes):
        raise UserError(
            f"train.perturbation_axes: expected numbers from 0 to {num_axes - 1}, got "
            f"{config.train.perturbation_axes}"
        )


def refuse_clips(config: Config, samples: str) -> None:
    """Raise if a field for clips is set, for a task without clips."""
    if config.data.frames:
        raise UserError(f"data.frames: expected 0 for {samples}, got {config.data.frames}")
    evaluate = config.evaluate
    clips = evaluate.frames or evaluate.spans or evaluate.reversed
    if clips or config.model.tubelet > 1:
        raise UserError(
            "data.frames: is 0, so there are no clips; expected the defaults of evaluate.frames, "
            "evaluate.spans, evaluate.reversed and model.tubelet"
        )


def require_defaults(section: str, fields: Any, names: Iterable[str], what: str) -> None:
    """Raise if a field that has no effect is set.

    Args:
        section: The name of the section.
        fields: The section.
        names: The fields without an effect.
        what: What they have no effect on, for the message.
    """
    usual = type(fields)()
    for name in names:
        if (value := getattr(fields, name)) != getattr(usual, name):
            raise UserError(
                f"{section}.{name}: has no effect on {what}; expected the default, got {value!r}"
            )
