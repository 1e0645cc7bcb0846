"""A model's arguments as JSON, and what is believed of a file that claims to hold some.

A file may come from anywhere: every value is looked at before a model is made of it, so that a
wrong one is an error that names it, and not a machine without memory.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

__all__ = ["RULES", "checked", "plain"]

MOST_AXES = 8
MOST_PATCHES = 2**31  # of the training grid
MOST_NUMBERS = 2**31  # of one patch

Rule = Callable[[str, Any], Any]


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON knows them. Left out: ``device`` and ``dtype``, which the weights have."""
    return {
        name: _plain(name, value)
        for name, value in arguments.items()
        if name not in ("device", "dtype")
    }


def _plain(label: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):  # numpy's among them
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Sequence):
        return [_plain(label, item) for item in value]
    raise TypeError(f"{label}: expected numbers, texts or lists of them, got {value!r}")


def checked(arguments: Any) -> dict[str, Any]:
    """The arguments of a ViT, each known, of its type and of a size that somebody may mean."""
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments: expected names and values, got {reprlib.repr(arguments)}")
    if unknown := sorted(set(arguments) - set(RULES)):
        raise ValueError(f"{unknown[0]}: is not an argument of ViT; is comrope too old for it?")
    good = {name: RULES[name](name, value) for name, value in arguments.items()}
    _check_products(good)
    return good


def _whole(least: int, most: int) -> Rule:
    def rule(label: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(label, f"an integer of {least} to {most}", value)
        return value

    return rule


def _number(least: float, most: float) -> Rule:
    def rule(label: str, value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise _wrong(label, f"a number of {least:g} to {most:g}", value)
        return value

    return rule


def _several(one: Rule, most: int) -> Rule:
    def rule(label: str, value: Any) -> Any:
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise _wrong(label, f"a list of 1 to {most} numbers", value)
        return tuple(one(label, item) for item in value)

    return rule


def _size(most: int) -> Rule:
    """One size for all axes, or one per axis."""
    one = _whole(1, most)
    several = _several(one, MOST_AXES)
    return lambda label, value: (several if isinstance(value, list) else one)(label, value)


def _or_null(rule: Rule) -> Rule:
    return lambda label, value: None if value is None else rule(label, value)


def _exactly(kind: type, words: str) -> Rule:
    def rule(label: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise _wrong(label, words, value)
        return value

    return rule


def _wrong(label: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{label}: expected {expected}, got {reprlib.repr(value)}")


def _check_products(arguments: dict[str, Any]) -> None:
    """What is sane for each axis may not be so for all of them."""
    img, patch = arguments.get("img_size", 224), arguments.get("patch_size", 16)
    axes = len(img) if isinstance(img, tuple) else len(patch) if isinstance(patch, tuple) else 2
    canvas, sizes = ((v,) * axes if isinstance(v, int) else v for v in (img, patch))
    patches = math.prod(canvas) // math.prod(sizes)
    if patches > MOST_PATCHES:
        raise _wrong("img_size", f"at most {MOST_PATCHES} patches, that is {patches}", img)
    numbers = math.prod(sizes) * arguments.get("in_chans", 3)
    if numbers > MOST_NUMBERS:
        raise _wrong("patch_size", f"at most {MOST_NUMBERS} numbers, that is {numbers}", patch)


_TEXT = _exactly(str, "a text")  # which ones are known, the model itself says
_YES_OR_NO = _exactly(bool, "true or false")
# Far beyond any model there is, and far below what cannot be built without its weights.
RULES: dict[str, Rule] = {
    "img_size": _size(2**24),
    "patch_size": _size(2**24),
    "in_chans": _whole(1, 2**16),
    "num_classes": _whole(0, 2**24),
    "embed_dim": _whole(1, 2**16),
    "depth": _whole(0, 2**10),
    "num_heads": _whole(1, 2**16),
    "mlp_ratio": _number(0, 2**10),
    "position": _TEXT,
    "ape": _YES_OR_NO,
    "rotate_values": _YES_OR_NO,
    "near": _number(0, 1e6),
    "block_size": _whole(2, 2**16),
    "init": _TEXT,
    "axis_scale": _or_null(_several(_number(-1e30, 1e30), MOST_AXES)),
    "rope_units": _TEXT,
    "base": _or_null(_number(0, 1e30)),
    "class_token": _YES_OR_NO,
    "class_position": _TEXT,
    "global_pool": _TEXT,
    "drop_path_rate": _number(0, 1),
    "layer_scale": _or_null(_number(-1e6, 1e6)),
    "init_std": _number(0, 1e6),
    # of the rotation
    "backend": _TEXT,
    "channel_order": _TEXT,
    "axis_order": _TEXT,
    "spread": _number(0, 1e30),
    "frequencies": _or_null(_several(_number(0, 1e30), 2**16)),
    "shared_theta": _YES_OR_NO,
}
