"""The fields: every one has bounds, and the defaults are within them."""

from __future__ import annotations

import pytest

from comrope.experiments.config import Config, option_fields
from comrope.experiments.config.build import field_types
from comrope.models import vit

FIELDS = option_fields(Config)


@pytest.mark.parametrize("name", FIELDS)
def test_a_default_is_within_the_bounds(name):
    assert FIELDS[name].metadata["bounds"].accepts(FIELDS[name].default)


@pytest.mark.parametrize("name", FIELDS)
def test_every_number_has_a_largest_value(name):
    bounds, kind = FIELDS[name].metadata["bounds"], str(field_types(Config)[name])
    of_numbers = "int" in kind or "float" in kind
    assert (bounds.maximum is not None or bounds.below is not None) == of_numbers


def test_choices_are_those_of_the_model():
    for name, choices in {
        "model.position_units": vit.POSITION_UNITS,
        "model.class_position": vit.CLASS_POSITIONS,
        "model.global_pool": vit.POOLS,
    }.items():
        assert {*FIELDS[name].metadata["bounds"].choices} == {*choices}
