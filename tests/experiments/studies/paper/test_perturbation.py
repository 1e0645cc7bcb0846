"""The rows of the study of perturbations; its table is tested with block sizes."""

from __future__ import annotations

from support.studies import plan_of


def test_two_methods_have_five_strengths():
    sigmas = [0.0, 0.25, 0.5, 0.75, 1.0]
    rows = [(row.method, row.perturbation) for row in plan_of("perturbation").rows]
    assert rows == [(m, sigma) for m in ("ape", "comrope-ld") for sigma in sigmas]
