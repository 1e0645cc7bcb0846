"""The fields of a configuration that a position encoding sets."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.config.build import suggest
from comrope.methods import METHODS, method_class

__all__ = ["commutes", "method_fields", "method_names", "starts_at_zero"]

NOT_ROTARY = ("none", "ape")


def method_names() -> tuple[str, ...]:
    """Return all values of ``model.position``."""
    return (*NOT_ROTARY, *METHODS)


def commutes(method: str) -> bool:
    """Return whether rotations commute; if not, each position needs a matrix exponential."""
    return method in NOT_ROTARY or method_class(method).commutes


def starts_at_zero(method: str) -> bool:
    """Return whether a method can be added to a trained model without a change of its outputs."""
    return method in NOT_ROTARY or method_class(method).starts_at_zero


def method_fields(
    method: str, perturbation: float | None = None, finetuned: bool = False
) -> dict[str, Any]:
    """Return the fields that a method sets, by dotted name.

    Args:
        method: The position encoding, one of ``method_names()``.
        perturbation: Perturbation of the coordinates; by default that of the recipe.
        finetuned: Whether training starts from weights with absolute positions. Then a rotation is
            added, and its angles start at zero if they can learn from there.

    Raises:
        UserError: The method is unknown.
    """
    if method not in method_names():
        raise UserError(
            f"method: expected one of {', '.join(method_names())}, got {method!r}"
            f"{suggest(method, method_names())}"
        )
    fields: dict[str, Any] = {"model.position": method}
    if perturbation is not None:
        fields["train.perturbation"] = perturbation
    if not commutes(method):  # one matrix exponential per position, not one per sample too
        fields["train.perturbation_per"] = "batch"
    if finetuned:
        fields["model.ape"] = method != "ape"
        rotates = method not in NOT_ROTARY
        fields["model.init"] = "zeros" if rotates and starts_at_zero(method) else "normal"
    return fields
