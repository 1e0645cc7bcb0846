"""A complete configuration: its sections, overrides, and values that contradict each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import name_shown, shown
from comrope.experiments.config.bounds import Bounds
from comrope.experiments.config.build import (
    Scalar,
    Text,
    build,
    checked,
    flat,
    option,
    option_fields,
    suggest,
    to_dict,
)
from comrope.experiments.config.schema import (
    SHORT,
    Augment,
    Data,
    Detect,
    Evaluate,
    Language,
    Model,
    Optim,
    Train,
)
from comrope.experiments.config.upgrades import upgrade

__all__ = ["Config", "build_config", "read_numbers"]

OFFSETS = Bounds(maximum=1000, shortest=1)  # of an evaluation, in image widths


@dataclass(frozen=True)
class Config:
    """A complete run."""

    task: str = option(
        "",
        longest=SHORT,
        help="The task: a name of TASKS, or package.module:Class; by default derived from "
        "data.name.",
    )
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)
    detect: Detect = field(default_factory=Detect)
    language: Language = field(default_factory=Language)
    # Of a task that is defined outside of comrope, and checked by that task.
    options: dict[str, Scalar] = field(default_factory=dict, hash=False)

    def with_overrides(self, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
        """Return a copy with other values of some fields.

        Args:
            overrides: Texts such as "train.epochs=3" from a command line, or values by dotted name.

        Raises:
            UserError: A field is unknown, or a value is invalid.
        """
        if not isinstance(overrides, Mapping):
            overrides = dict(_split(text) for text in overrides)
        fields, changes = upgrade(overrides)
        for change in changes:
            warnings.warn(change, DeprecationWarning, stacklevel=2)
        tree, own = to_dict(self), flat(self)
        for name, value in fields.items():
            section, _, key = name.partition(".")
            if name not in own and not (section == "options" and key):
                raise UserError(f"{name_shown(name)}: no such field{suggest(name, own)}")
            if key:
                tree[section][key] = value
            else:
                tree[name] = value
        return build_config(tree)


def build_config(tree: Mapping[str, Any], where: str = "") -> Config:
    """Build a configuration from sections with fields.

    Args:
        tree: Sections with plain values by field; fields outside of any section by name.
        where: Text before a field's name in messages.

    Raises:
        UserError: A field is unknown, a value is invalid, or two values contradict each other. The
            task checks fields of its kind of data.
    """
    config: Config = build(Config, tree, where)
    train = config.train
    if (train.precision, train.strategy) == ("fp16", "fsdp2"):
        raise UserError("train.precision: expected no or bf16 with train.strategy=fsdp2, got fp16")
    if train.batch_size % train.accumulate:
        raise UserError(
            f"train.accumulate: expected a divisor of train.batch_size {train.batch_size}, got "
            f"{train.accumulate}"
        )
    if config.optim.min_lr > config.optim.lr:
        raise UserError(
            f"optim.min_lr: expected at most optim.lr {config.optim.lr:g}, got "
            f"{config.optim.min_lr:g}"
        )
    return config


def read_numbers(option: str, text: str) -> tuple[Any, ...]:
    """Return the numbers of an option of ``comrope eval``.

    Args:
        option: "--resolutions", which has the bounds of ``evaluate.resolutions``, or "--offsets".
        text: Numbers separated by commas, as typed.

    Raises:
        UserError: The text has another form, or a number is out of bounds.
    """
    kind: Any = tuple[float, ...]
    bounds = OFFSETS
    if option == "--resolutions":
        field = option_fields(Config)["evaluate.resolutions"]
        kind, bounds = tuple[int, ...], replace(field.metadata["bounds"], shortest=1)
    found: tuple[Any, ...] = checked(kind, bounds, Text(text), option)
    return found


def _split(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UserError(f"{shown(text)}: expected a field and its value, such as train.epochs=3")
    return name.strip(), Text(value)
