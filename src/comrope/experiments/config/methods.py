"""The fields of a configuration that a position encoding sets."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.config.build import suggest

__all__ = ["method_fields", "method_names"]

NOT_ROTARY = ("none", "ape")


def method_names() -> tuple[str, ...]:
    """Return all values of ``model.position``."""
    from comrope.methods import METHODS  # imported here, because listing recipes does not need it

    return (*NOT_ROTARY, *METHODS)


def method_fields(
    method: str, perturbation: float | None = None, finetuned: bool = False
) -> dict[str, Any]:
    """Return the fields that a method sets, by dotted name.

    Args:
        method: The position encoding, one of ``method_names()``.
        perturbation: Perturbation of the coordinates; by default that of the recipe.
        finetuned: Whether training starts from weights with absolute positions. Then a rotation is
            added, and its angles start at zero, except the fixed angles of vanilla RoPE.

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
    if method == "liere":  # it computes a matrix exponential for every new position
        fields["train.perturbation_per"] = "batch"
    if finetuned:
        fields["model.ape"] = method != "ape"
        fields["model.init"] = "normal" if method in ("ape", "rope") else "zeros"
    return fields
