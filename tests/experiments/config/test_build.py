"""Dataclasses from plain values: types, bounds, choices, suggestions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, option_fields, to_dict
from comrope.experiments.config.build import Text, build, flat, option


@dataclass(frozen=True)
class Part:
    kind: str = option("a", choices=("a", "b"), help="A choice.")
    share: float = option(0.5, above=0, maximum=1, help="A share.")
    count: int = option(1, minimum=1, help="A count.")
    pair: tuple[float, float] = option((0.0, 1.0), ordered=True, help="Two numbers.")
    some: tuple[int, ...] = option((), help="Any number of numbers.")
    name: str | None = option(None, help="A text or nothing.")
    on: bool = option(False, help="A switch.")


@dataclass(frozen=True)
class Whole:
    part: Part = field(default_factory=Part)


def built(**values) -> Part:
    return build(Whole, {"part": values}, "").part


def test_values_get_the_type_of_their_field():
    part = built(share=1, pair=[1, 2], some=3, name=None)
    assert (part.share, part.pair, part.some, part.name) == (1.0, (1.0, 2.0), (3,), None)
    assert isinstance(part.share, float)


def test_typed_text_is_yaml_except_for_text_fields():
    part = built(
        share=Text("1e-3"), pair=Text("[0,2]"), some=Text("1,2"), name=Text("2024"), on=Text("yes")
    )
    assert part == Part(share=1e-3, pair=(0.0, 2.0), some=(1, 2), name="2024", on=True)
    assert built(name=Text("null")).name is None


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "c"},
        {"share": 0},
        {"share": 1.5},
        {"share": float("nan")},
        {"count": 0},
        {"count": 1.5},
        {"count": True},
        {"count": Text("many")},
        {"count": Text("[1")},
        {"pair": [1]},
        {"pair": [1, 0]},
        {"pair": [0, float("nan")]},
        {"pair": [0, float("inf")]},
        {"pair": Text("[0,.nan]")},
        {"pair": [0, 10**400]},
        {"pair": [[0], 1]},
        {"pair": None},
        {"some": [1] * 101},
        {"some": [1.0]},
        {"share": 10**400},
        {"share": Text("9" * 5000)},
        {"count": 10**5000},
        {"count": Text("[" * 3000)},
        {"name": "a\0b"},
        {"name": [1]},
        {"on": 3},
    ],
)
def test_values_that_are_not_accepted_are_named(values):
    (name,) = values
    with pytest.raises(UserError, match=rf"part\.{name}: expected"):
        built(**values)


def test_unknown_fields_get_a_suggestion():
    with pytest.raises(UserError, match=r"part\.shaer: .*did you mean share"):
        built(shaer=1)
    with pytest.raises(UserError, match="part"):
        build(Whole, {"part": 3}, "")


def test_every_field_of_a_configuration_is_plain_yaml_and_has_help():
    about = option_fields(Config)
    for name, value in flat(Config()).items():
        assert value is None or isinstance(value, (bool, int, float, str, list))
        assert about[name].metadata["help"].endswith(".")
    assert build(Config, to_dict(Config()), "") == Config()
