"""Checks of a configuration that several tasks share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import TIMM, Config

__all__ = ["check_axes", "check_images", "refuse_clips", "require_defaults"]

NAME = re.compile(rf"(comrope_)?vit_[a-z]+_patch\d+_\d+|{TIMM}\w+(\.\w+)?")


def check_images(config: Config) -> None:
    """Raise unless the fields that all tasks with images and ViTs share are valid."""
    name = config.model.name
    if not NAME.fullmatch(name):
        raise UserError(
            f"model.name: expected vit_SIZE_patchP_RESOLUTION or timm:NAME, got {name!r}"
        )
    data = config.data
    if not len(data.mean) == len(data.std) == data.in_chans:
        raise UserError(
            f"data.mean: expected {data.in_chans} values (data.in_chans), as for data.std, got "
            f"{len(data.mean)} and {len(data.std)}"
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
