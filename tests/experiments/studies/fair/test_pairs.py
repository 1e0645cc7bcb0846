"""Which rows are compared with which."""

from __future__ import annotations

from support.studies import results_of, row_of

from comrope.experiments.studies.fair.pairs import all_pairs, extension_pairs
from comrope.experiments.studies.fair.rows import EXTENSIONS

BOTH = {"fields": dict.fromkeys(EXTENSIONS, 1.0)}


def row(method, label="", level=1.0, **about):
    return row_of({0: {"8": level, "16": level}}, method, label=label, **about)


def test_pairs_have_the_same_perturbation_and_the_control_any():
    rows = [
        row("ape"), row("comrope-ld"), row("comrope-ld", perturbation=0.0),
        row("ape", perturbation=0.0), row("none", perturbation=0.0), row("comrope-torus"),
    ]  # fmt: skip
    found = all_pairs(results_of(rows))
    names = {(p.mine["method"], p.mine["perturbation"], p.other["method"]) for p in found}
    assert names == {
        ("comrope-ld", 1.0, "ape"),
        ("comrope-ld", 1.0, "none"),
        ("comrope-ld", 0.0, "ape"),
        ("comrope-ld", 0.0, "none"),
        ("comrope-torus", 1.0, "ape"),
        ("comrope-torus", 1.0, "none"),
        ("ape", 1.0, "ape"),  # with perturbation over without
        ("comrope-ld", 1.0, "comrope-ld"),
    }
    assert all(pair.other["perturbation"] in (0.0, pair.mine["perturbation"]) for pair in found)


def test_a_plain_row_is_not_compared_with_an_extended_one():
    rows = [row("ape", "ape"), row("comrope-torus", "plain"), row("rope", "rope, extended", **BOTH),
            row("comrope-torus", "extended", **BOTH)]  # fmt: skip
    names = {(p.mine["label"], p.other["label"]) for p in all_pairs(results_of(rows))}
    assert names == {
        ("extended", "rope, extended"), ("extended", "ape"), ("plain", "ape"),
        ("extended", "plain"),
    }  # fmt: skip


def test_extended_vanilla_rope_is_compared_with_vanilla_rope_in_patch_units():
    rows = [row("rope", "relative"), row("rope", "patch", 2.0),
            row("rope", "patch", 3.0, perturbation=0.0),
            row("rope", "extended", 4.0, **BOTH)]  # fmt: skip
    extended, perturbed = all_pairs(results_of(rows))
    assert (extended.mine["label"], extended.other["label"]) == ("extended", "patch")
    assert extended.mean.mean == 2.0
    assert (perturbed.mine["label"], perturbed.mean.mean) == ("patch", -1.0)


def test_rows_with_more_epochs_are_compared_with_extended_rows_only():
    rows = [
        row("rope", "patch"), row("comrope-torus", "plain"), row("rope", "full", **BOTH),
        row("comrope-torus", "torus, full", **BOTH), row("rope", "longer", epochs=1.25),
        row("rope", "full, longer", epochs=1.25, **BOTH),
    ]  # fmt: skip
    names = {(p.mine["label"], p.other["label"]) for p in all_pairs(results_of(rows))}
    assert names == {
        ("plain", "patch"), ("torus, full", "patch"), ("torus, full", "longer"),
        ("torus, full", "full"), ("torus, full", "plain"), ("full", "patch"),
        ("torus, full", "full, longer"), ("full, longer", "longer"),
    }  # fmt: skip


def test_extensions_are_compared_one_by_one_too():
    one = {"fields": {EXTENSIONS[0]: True}}
    rows = [row("rope", "plain"), row("rope", "values", **one), row("rope", "both", **BOTH)]
    names = [(p.mine["label"], p.other["label"]) for p in extension_pairs(results_of(rows), 1)]
    assert names == [("values", "plain"), ("both", "values")]
