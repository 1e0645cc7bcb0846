"""Bounds: what they accept, and their words."""

from __future__ import annotations

import math

import pytest

from comrope.experiments.config.bounds import LONGEST_LIST, LONGEST_TEXT, Bounds, expected

INF = math.inf


@pytest.mark.parametrize(
    ("bounds", "accepted", "refused"),
    [
        ({}, [0, 1e300, ()], [-1, -1e-300, INF, -INF, math.nan, (1.0, math.nan), (-1,)]),
        ({"minimum": 2, "maximum": 3}, [2, 3, (2, 3)], [1, 4, 1.999, (2, 4), 10**400]),
        ({"above": 0, "maximum": 1}, [1e-300, 1], [0, 0.0, 1.1, math.nan]),
        ({"below": 1}, [0, 0.999], [1, 1.0, (0.5, 1.0)]),
        ({"ordered": True}, [(0, 0), (0, 1)], [(1, 0), (1.0, 0.999)]),
        ({"nonzero": True}, [(), (0, 1)], [(0,), (0.0, 0)]),
        ({"shortest": 1, "longest": 2}, [(1,), (1, 2), "ab"], [(), (1, 2, 3), "", "abc"]),
        ({}, [(0,) * LONGEST_LIST, "a" * LONGEST_TEXT, "", "é 💥 \u202f"],
         [(0,) * (LONGEST_LIST + 1), "a" * (LONGEST_TEXT + 1), "a\0", "a\n", "\x7f", "\u2028",
          "\udcff", "\x1b[31m"]),
        ({"choices": ("a", "b")}, ["a", None], ["c", ""]),
        ({}, [True, None], []),
    ],
)  # fmt: skip
def test_values_within_bounds_are_accepted(bounds, accepted, refused):
    for value in accepted:
        assert Bounds(**bounds).accepts(value), value
    for value in refused:
        assert not Bounds(**bounds).accepts(value), value


@pytest.mark.parametrize(
    ("kind", "bounds", "words"),
    [
        (float, {"above": 0, "maximum": 1}, "a number above 0 and up to 1"),
        (int, {"minimum": 1, "maximum": 9}, "an integer from 1 to 9"),
        (float, {"below": 1}, "a number of at least 0 and below 1"),
        (float | None, {}, "a number of at least 0, or null"),
        (str, {"choices": ("a", "b")}, "one of a, b"),
        (bool, {}, "true or false"),
        (tuple[float, float], {"maximum": 1, "ordered": True},
         "2 numbers from 0 to 1, the first at most the second"),
        (tuple[int, ...], {"shortest": 1, "maximum": 5}, "1 to 100 integers from 0 to 5"),
    ],
)  # fmt: skip
def test_bounds_in_words(kind, bounds, words):
    assert expected(kind, Bounds(**bounds)) == words
