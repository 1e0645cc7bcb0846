"""Checks of weights by name: shapes, dtypes, values."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Collection, Mapping

from torch import Tensor

from comrope import _checks

__all__ = ["Shapes", "misfits", "mixed_dtypes", "nonfinite", "shapes_of"]

Shapes = dict[str, tuple[int, ...]]


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the shape of every tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def misfits(expected: Shapes, found: Shapes) -> list[str]:
    """List what is missing in ``found``, has another shape than expected, or is unexpected.

    The one check that weights fit a model; an empty list means that they do.
    """
    wrong = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"{name} is missing")
        elif found[name] != shape:
            wrong.append(f"{name} has shape {reprlib.repr(found[name])}, expected {shape}")
    unexpected = sorted(set(found) - set(expected))
    return wrong + [f"{_checks.name_shown(name)} is unexpected" for name in unexpected]


def mixed_dtypes(dtypes: Mapping[str, object], rotations: Collection[str]) -> list[str]:
    """List the weights that have another dtype than most.

    Rotations compute in float32 or wider. So they may have another dtype than the other weights.

    Args:
        dtypes: The dtype of every weight, by name.
        rotations: The names of the rotations in the model.
    """
    prefixes, wrong = tuple(f"{name}." for name in rotations), []
    for of_rotations in (False, True):
        part = {n: d for n, d in dtypes.items() if n.startswith(prefixes) == of_rotations}
        for usual, _ in Counter(part.values()).most_common(1):
            wrong += [
                f"{name} has dtype {dtype}, expected {usual} as of the other weights"
                for name, dtype in part.items()
                if dtype != usual
            ]
    return wrong


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """List the tensors with NaN or infinite values."""
    return [f"{name} is not finite" for name in _checks.nonfinite(tensors)]
