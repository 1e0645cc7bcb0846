"""Which fields of a configuration go together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from comrope.experiments.common.errors import UserError

if TYPE_CHECKING:
    from comrope.experiments.config import Config

__all__ = ["TIMM", "checked"]

TIMM = "timm:"  # in front of a name of timm's
NAME = re.compile(rf"(comrope_)?vit_[a-z]+_patch\d+_\d+|{TIMM}\w+(\.\w+)?")


def checked(config: Config) -> Config:
    """Return the configuration if its fields go together; raise otherwise."""
    if (config.train.precision, config.train.strategy) == ("fp16", "fsdp2"):
        raise UserError("train.precision: expected no or bf16 with train.strategy=fsdp2, got fp16")
    if not config.evaluate.resolutions and not config.detects:
        raise UserError("evaluate.resolutions: expected at least one, got none")
    if not NAME.fullmatch(config.model.name):
        raise UserError(
            "model.name: expected vit_SIZE_patchP_RESOLUTION or timm:NAME, got "
            f"{config.model.name!r}"
        )
    data = config.data
    if not len(data.mean) == len(data.std) == data.in_chans:
        raise UserError(
            f"data.mean: expected data.in_chans {data.in_chans} values, as data.std; "
            f"got {len(data.mean)} and {len(data.std)}"
        )
    _check_holdout(config)
    _check_clips(config)
    if config.detects:
        _check_detection(config)
    parts = config.train.accumulate
    if config.train.batch_size % parts:
        raise UserError(
            f"train.accumulate: expected a divisor of train.batch_size {config.train.batch_size}, "
            f"got {parts}"
        )
    return config


def _check_holdout(config: Config) -> None:
    share = config.data.holdout
    if share >= 1:
        raise UserError(f"data.holdout: expected a share below 1, got {share:g}")
    kind = "clips" if config.data.frames else "images with boxes" if config.detects else ""
    if share and kind:
        raise UserError(f"data.holdout: {kind} cannot be held out; expected 0, got {share:g}")


def _check_clips(config: Config) -> None:
    frames, model, evaluate = config.data.frames, config.model, config.evaluate
    axes = 3 if frames else 2
    if frames:
        if frames % model.tubelet:
            raise UserError(
                f"model.tubelet: expected a divisor of data.frames {frames}, got {model.tubelet}"
            )
        for name in ("cutmix", "erase"):
            if value := getattr(config.augment, name):
                raise UserError(f"augment.{name}: knows images only; expected 0, got {value:g}")
        if model.name.startswith(TIMM):
            raise UserError(f"data.frames: {model.name} knows images only; expected 0")
    elif config.data.name in ("moving", "ucf101"):
        raise UserError(f"data.frames: {config.data.name} is of clips; expected at least 1, got 0")
    elif evaluate.frames or evaluate.spans or model.tubelet > 1:
        raise UserError("data.frames: is 0, so there are no clips to cut or to evaluate")
    if len(model.axis_scale) not in (0, axes):
        raise UserError(f"model.axis_scale: expected {axes} numbers, got {model.axis_scale}")
    if any(axis not in range(axes) for axis in config.train.perturbation_axes):
        raise UserError(
            f"train.perturbation_axes: expected numbers from 0 to {axes - 1}, got "
            f"{config.train.perturbation_axes}"
        )
    if any(not 0 < span <= 1 for span in evaluate.spans):
        raise UserError(f"evaluate.spans: expected numbers up to 1, got {evaluate.spans}")


def _check_detection(config: Config) -> None:
    """Detection has a ViT of ours, all of whose positions are where they are, on every device."""
    if config.model.name.startswith(TIMM):
        raise UserError(
            "model.name: expected vit_SIZE_patchP_RESOLUTION, a ViT of ours; train.start_from fills"
            f" it with timm's weights; got {config.model.name!r}"
        )
    for name, wanted in (("perturbation", 0), ("rescale", 1), ("strategy", "ddp")):
        if (value := getattr(config.train, name)) != wanted:
            raise UserError(f"train.{name}: expected {wanted} of a detector, got {value!r}")
    for name in ("mixup", "cutmix", "erase", "smoothing", "color_jitter", "auto_augment"):
        if value := getattr(config.augment, name):
            raise UserError(f"augment.{name}: is not done to images with boxes, got {value}")
    if config.data.cache:
        raise UserError("data.cache: images with boxes are not kept in memory; expected false")
    low, high = config.detect.jitter
    if not 0 < low <= high:
        raise UserError(f"detect.jitter: expected two scales above 0, got {config.detect.jitter}")
    if len(config.detect.anchors) != 5:
        raise UserError(
            f"detect.anchors: expected five sizes, one a level, got {config.detect.anchors}"
        )
