"""Differences between two rows, seed by seed, and how sure one may be of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t, ttest_rel

from comrope.experiments.studies.stats import Difference, by_seed, compare, decided_together
from experiments.results import cell_of

settings.register_profile("comrope", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("comrope")

accuracies = st.floats(0, 100)
several = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=8)


def cell(values: list[float]) -> dict:
    return cell_of({seed: {"16": value} for seed, value in enumerate(values)})


def of_pairs(pairs: list[tuple[float, float]]) -> Difference:
    mine, other = zip(*pairs, strict=True)
    found = compare(cell(list(mine)), cell(list(other)), ["16"])
    assert found is not None
    return found


def test_it_is_the_paired_t_test_of_scipy():
    mine, other = [72.1, 73.4, 71.0, 72.8, 74.0], [71.5, 73.6, 70.1, 71.9, 72.7]
    expected = ttest_rel(mine, other)
    low, high = expected.confidence_interval(0.95)
    found = compare(cell(mine), cell(other), ["16"])
    assert found == pytest.approx((expected._estimate, low, high, 5))
    assert found.chance == pytest.approx(expected.pvalue)


def test_of_two_seeds_by_hand():
    """Differences 1 and 3: mean 2, deviation sqrt(2), and t is 12.706 with one degree left."""
    found = compare(cell([11, 13]), cell([10, 10]), ["16"])
    assert found == pytest.approx((2, 2 - 12.7062, 2 + 12.7062, 2), abs=1e-4)
    assert found.verdict == "undecided"


def test_only_seeds_that_both_have_count():
    mine = cell_of({0: {"16": 50.0}, 2: {"16": 60.0}, 3: {"16": 70.0}})
    other = cell_of({3: {"16": 40.0}, 1: {"16": 90.0}, 0: {"16": 30.0}})
    found = compare(mine, other, ["16"])
    assert (found.mean, found.seeds) == (25, 2)
    assert compare(mine, cell_of({7: {"16": 1.0}}), ["16"]) is None


def test_one_seed_has_no_interval_and_decides_nothing():
    assert compare(cell([90]), cell([10]), ["16"]) == (80, None, None, 1)
    assert compare(cell([90]), cell([10]), ["16"]).verdict == "undecided"


def test_the_mean_over_views_is_taken_before_the_difference():
    mine = cell_of({0: {"8": 10.0, "16": 50.0}, 1: {"8": 20.0, "16": 40.0}})
    other = cell_of({0: {"8": 12.0, "16": 40.0}, 1: {"8": 20.0, "16": 44.0}})
    assert by_seed(mine, ["8", "16"]) == {0: 30, 1: 30}
    assert compare(mine, other, ["8", "16"]).mean == pytest.approx(1)
    assert compare(mine, other, ["8"]).mean == pytest.approx(-1)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.1, 2.0, "better"), (-2.0, -0.1, "worse"), (-1.0, 1.0, "undecided"), (0, 1, "undecided")],
)
def test_the_word_is_what_the_interval_allows(low, high, word):
    assert Difference((low + high) / 2, low, high, 3).verdict == word


@given(pairs=several)
def test_the_interval_contains_the_mean(pairs):
    found = of_pairs(pairs)
    assert found.low <= found.mean <= found.high


@given(pairs=several)
def test_swapping_flips_the_sign(pairs):
    there, back = of_pairs(pairs), of_pairs([(b, a) for a, b in pairs])
    assert back == pytest.approx((-there.mean, -there.high, -there.low, len(pairs)))


@given(pairs=several, shift=st.floats(-50, 50))
def test_what_moves_both_changes_nothing(pairs, shift):
    """Seed by seed too: a seed that is hard for both is no difference."""
    moved = [(a + shift * seed, b + shift * seed) for seed, (a, b) in enumerate(pairs)]
    assert of_pairs(moved) == pytest.approx(of_pairs(pairs), abs=1e-9, rel=1e-6)


def with_chance(p: float) -> Difference:
    """Of five seeds, one in 1 / p of which would be chance."""
    mean = float(t.isf(p / 2, 4))
    reach = float(t.isf(0.025, 4))
    return Difference(mean, mean - reach, mean + reach, 5)


def test_asked_at_once_the_surest_comes_first_and_one_that_fails_ends_it():
    """By hand, of four at 5 %: 0.0125, 0.0167, 0.025, 0.05 are the thresholds, in order."""
    found = [with_chance(p) for p in (0.024, 0.001, 0.03, 0.016)]
    assert [each.verdict for each in found] == ["better"] * 4
    assert decided_together(found) == [True, True, True, True]
    found[0] = with_chance(0.026)  # the third, which ends it, though the fourth would have passed
    assert decided_together(found) == [False, True, False, True]
    assert decided_together([*found, None, with_chance(0.9)]) == [False, True] + [False] * 4


def test_one_seed_and_no_difference_are_never_decided():
    assert decided_together([Difference(80, None, None, 1), Difference(0, 0, 0, 3)]) == [False] * 2
    assert decided_together([Difference(2, 2, 2, 3)]) == [True]


@given(pairs=several)
def test_alone_it_is_what_the_interval_says(pairs):
    found = of_pairs(pairs)
    assert decided_together([found]) == [found.verdict != "undecided"]
