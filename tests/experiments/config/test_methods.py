"""What a method sets in a configuration, in recipes and in studies alike."""

from __future__ import annotations

import pytest
from helpers import FROM_ZERO

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, commutes, load_recipe, method_fields, method_names
from comrope.experiments.studies import PRESETS, STUDIES, Row


@pytest.mark.parametrize("finetuned", [False, True])
def test_fields_of_every_method_are_accepted(finetuned):
    for method in method_names():
        config = Config().with_overrides(method_fields(method, 0.5, finetuned))
        assert (config.model.position, config.train.perturbation) == (method, 0.5)
        assert (config.train.perturbation_per == "sample") == commutes(method)
        assert config.model.ape == (finetuned and method != "ape")
        assert (config.model.init == "zeros") == (finetuned and method in FROM_ZERO)


def test_the_perturbation_may_be_left_as_it_is():
    assert "train.perturbation" not in method_fields("comrope-ld")


def test_unknown_methods_get_a_suggestion():
    with pytest.raises(UserError, match=r"method: .*did you mean comrope-ld"):
        method_fields("comrope-dl")


def test_a_recipe_of_a_method_is_what_the_study_runs():
    for each in STUDIES["classification"].rows(PRESETS["paper"]):
        row = load_recipe("imagenet", each.method, each.perturbation)
        planned = each.config(load_recipe(PRESETS["paper"].recipe), 0)
        # Without perturbation, how it is drawn decides nothing.
        if not each.perturbation:
            planned = planned.with_overrides({"train.perturbation_per": "sample"})
        assert row == planned


def test_a_row_keeps_what_is_its_own():
    base = load_recipe("digits").with_overrides(["model.block_size=2", "train.perturbation=0"])
    config = Row("comrope-ap", perturbation=1.0, block_size=8).config(base, 3)
    assert (config.model.block_size, config.train.perturbation, config.train.seed) == (8, 1, 3)
