"""Check the arguments of a saved model against the signature of its constructor.

Types come from the annotations of the constructor, bounds from the table in this file. So a wrong
value raises an error that names the argument, before any memory is allocated.
"""

from __future__ import annotations

import inspect
import math
import reprlib
import types
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import (
    TYPE_CHECKING,
    Any,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from comrope.inits import RENAMED

if TYPE_CHECKING:
    from comrope.models.pretrained import Pretrained

__all__ = ["check_arguments", "to_json"]

# Smallest and largest value of arguments in a file: beyond those of any existing model, but small
# enough to build the model without its weights.
INTEGERS, NUMBERS = (1, 2**16), (0, 1e30)
RANGES: dict[str, tuple[float, float]] = {
    "img_size": (1, 2**24),
    "patch_size": (1, 2**24),
    "num_classes": (0, 2**24),
    "vocab_size": (1, 2**24),
    "context": (2, 2**31),
    "depth": (0, 2**10),
    "block_size": (2, 2**16),
    "mlp_ratio": (0, 2**10),
    "drop_path_rate": (0, 1),
    "layer_scale": (-1e6, 1e6),
    "axis_scale": (-1e30, 1e30),
    "rotated_share": (0, 1),
}
LENGTHS = {"frequencies": 2**16}  # of lists; of all others, which have one number per axis:
MOST_AXES = 8
MOST_PATCHES = MOST_VALUES = 2**31  # patches of the training grid, values of one patch


def to_json(label: str, value: Any) -> Any:
    """Convert a value to JSON types: NumPy's numbers to Python's, tuples to lists."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Sequence):
        return [to_json(label, item) for item in value]
    raise TypeError(f"{label}: expected numbers, strings or lists of them, got {value!r}")


def check_arguments(model: type[Pretrained], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Check names, types and bounds of arguments from a file; return them for ``model``.

    Args:
        model: The class that will be called with them, by keyword.
        arguments: Names and JSON values. Names of older versions are replaced.

    The constructor checks which strings are valid.
    """
    arguments = {model.renamed_arguments.get(name, name): v for name, v in arguments.items()}
    if isinstance(init := arguments.get("init"), str):
        arguments["init"] = RENAMED.get(init, init)
    types_of = {**_keyword_types(model), **model.extra_arguments}
    if unknown := sorted(set(arguments) - set(types_of)):
        raise ValueError(
            f"{reprlib.repr(unknown[0])}: is not an argument of {model.__name__}; was it saved by "
            "a newer version of comrope?"
        )
    checked = {name: _check_value(name, v, types_of[name]) for name, v in arguments.items()}
    _check_sizes(checked)
    return checked


def _keyword_types(model: type) -> dict[str, Any]:
    hints = get_type_hints(model.__init__)  # type: ignore[misc]
    parameters = inspect.signature(model).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def _check_value(label: str, value: Any, hint: Any) -> Any:
    """Return a value if it is of type ``hint``; lists become tuples.

    ``hint`` is bool, str, int or float, or a union of one of these with None or a sequence of it.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    sequences = [kind for kind in kinds if get_origin(kind) is Sequence]
    single = [kind for kind in kinds if kind is not type(None) and kind not in sequences]
    if sequences and (isinstance(value, list) or not single):
        most = LENGTHS.get(label, MOST_AXES)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise _wrong(label, f"a list of 1 to {most} numbers", value)
        return tuple(_check_value(label, item, get_args(sequences[0])[0]) for item in value)
    if single[0] in (bool, str):
        if not isinstance(value, single[0]):
            raise _wrong(label, "a string" if single[0] is str else "true or false", value)
        return value
    return _check_number(label, value, single[0])


def _check_number(label: str, value: Any, kind: type) -> Any:
    integer = kind is int
    least, most = RANGES.get(label, INTEGERS if integer else NUMBERS)
    if type(value) not in (int, kind) or not least <= value <= most:
        bounds = f"{least} to {most}" if integer else f"{least:g} to {most:g}"
        raise _wrong(label, f"{'an integer' if integer else 'a number'} of {bounds}", value)
    return value


def _check_sizes(arguments: Mapping[str, Any]) -> None:
    """Check products of sizes: each size may be valid while their product is too large."""
    img, patch = arguments.get("img_size", 224), arguments.get("patch_size", 16)
    axes = len(img) if isinstance(img, tuple) else len(patch) if isinstance(patch, tuple) else 2
    canvas, sizes = ((v,) * axes if isinstance(v, int) else v for v in (img, patch))
    patches = math.prod(canvas) // math.prod(sizes)
    if patches > MOST_PATCHES:
        raise _wrong("img_size", f"at most {MOST_PATCHES} patches, not {patches}", img)
    values = math.prod(sizes) * arguments.get("in_chans", 3)
    if values > MOST_VALUES:
        raise _wrong("patch_size", f"at most {MOST_VALUES} values, not {values}", patch)


def _wrong(label: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{label}: expected {expected}, got {reprlib.repr(value)}")
