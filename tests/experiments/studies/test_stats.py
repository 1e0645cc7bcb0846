"""Differences between two rows, paired by seed, and whether they are significant."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t, ttest_rel
from support.studies import row_of

from comrope.experiments.studies.stats import Difference, by_seed, compare, holm

settings.register_profile("comrope", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("comrope")

accuracies = st.floats(0, 100).map(lambda value: round(value, 6))
several = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=8)


def row(values: list[float]) -> dict:
    return row_of({seed: {"16": value} for seed, value in enumerate(values)})


def of_pairs(pairs: list[tuple[float, float]]) -> Difference:
    mine, other = zip(*pairs, strict=True)
    found = compare(row(list(mine)), row(list(other)), ["16"])
    assert found is not None
    return found


def test_it_is_the_paired_t_test_of_scipy():
    mine, other = [72.1, 73.4, 71.0, 72.8, 74.0], [71.5, 73.6, 70.1, 71.9, 72.7]
    expected = ttest_rel(mine, other)
    low, high = expected.confidence_interval(0.95)
    found = compare(row(mine), row(other), ["16"])
    assert found[:5] == pytest.approx((expected._estimate, low, high, 5, expected.pvalue))


def test_of_two_seeds_by_hand():
    """Differences 1 and 3: mean 2, deviation sqrt(2), and t is 12.706 with one degree left."""
    found = compare(row([11, 13]), row([10, 10]), ["16"])
    assert found[:4] == pytest.approx((2, 2 - 12.7062, 2 + 12.7062, 2), abs=1e-4)
    assert found.verdict == "undecided"


def test_only_seeds_that_both_have_count():
    mine = row_of({0: {"16": 50.0}, 2: {"16": 60.0}, 3: {"16": 70.0}})
    other = row_of({3: {"16": 40.0}, 1: {"16": 90.0}, 0: {"16": 30.0}})
    found = compare(mine, other, ["16"])
    assert (found.mean, found.seeds) == (25, 2)
    assert compare(mine, row_of({7: {"16": 1.0}}), ["16"]) is None


def test_one_seed_has_no_interval_and_is_undecided():
    assert compare(row([90]), row([10]), ["16"])[:5] == (80, None, None, 1, 1.0)
    assert compare(row([90]), row([10]), ["16"]).verdict == "undecided"


def test_equal_differences_have_an_interval_without_width():
    assert compare(row([3.3, 7.3]), row([1.1, 5.1]), ["16"])[1:5] == pytest.approx((2.2, 2.2, 2, 0))
    assert compare(row([3, 7]), row([3, 7]), ["16"])[:5] == (0, 0, 0, 2, 1.0)


def test_of_another_metric_less_can_be_better():
    def runs(*values: float) -> dict:
        return {"runs": [{"seed": n, "bits": {"8": v}} for n, v in enumerate(values)]}

    mine, other = runs(2.0, 2.1, 2.3), runs(3.0, 3.1, 3.2)
    for lower, verdict in ((True, "better"), (False, "worse")):
        found = compare(mine, other, ["8"], "bits", lower_is_better=lower)
        assert (found.mean, found.verdict) == (pytest.approx(-29 / 30), verdict)
        assert compare(mine, mine, ["8"], "bits", lower_is_better=lower).verdict == "undecided"


def test_the_mean_over_views_is_taken_before_the_difference():
    mine = row_of({0: {"8": 10.0, "16": 50.0}, 1: {"8": 20.0, "16": 40.0}})
    other = row_of({0: {"8": 12.0, "16": 40.0}, 1: {"8": 20.0, "16": 44.0}})
    assert by_seed(mine, ["8", "16"]) == {0: 30, 1: 30}
    assert compare(mine, other, ["8", "16"]).mean == pytest.approx(1)
    assert compare(mine, other, ["8"]).mean == pytest.approx(-1)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 2.0, "better"), (-2.0, -0.1, "worse"), (-1.0, 1.0, "undecided"), (0, 1, "undecided")],
)
def test_the_verdict_is_whether_the_interval_excludes_zero(low, high, verdict):
    assert Difference((low + high) / 2, low, high, 3).verdict == verdict


@given(pairs=several)
def test_the_interval_contains_the_mean(pairs):
    found = of_pairs(pairs)
    assert found.low <= found.mean <= found.high


@given(pairs=several)
def test_swapping_flips_the_sign(pairs):
    one, swapped = of_pairs(pairs), of_pairs([(b, a) for a, b in pairs])
    expected = (-one.mean, -one.high, -one.low, len(pairs), one.p_value)
    assert swapped[:5] == pytest.approx(expected, abs=1e-9)


@given(pairs=several, shift=st.floats(-50, 50))
def test_what_moves_both_runs_of_a_seed_changes_nothing(pairs, shift):
    moved = [(a + shift * seed, b + shift * seed) for seed, (a, b) in enumerate(pairs)]
    assert of_pairs(moved)[:4] == pytest.approx(of_pairs(pairs)[:4], abs=1e-6, rel=1e-6)


def with_p_value(p: float) -> Difference:
    """Of five seeds."""
    mean = float(t.isf(p / 2, 4))
    reach = float(t.isf(0.025, 4))
    return Difference(mean, mean - reach, mean + reach, 5, p)


def test_holm_takes_the_smallest_p_value_first_and_stops_at_one_that_fails():
    """By hand, of four at 5 %: the thresholds are 0.0125, 0.0167, 0.025, 0.05, in order."""
    found = [with_p_value(p) for p in (0.024, 0.001, 0.03, 0.016)]
    assert [each.verdict for each in found] == ["better"] * 4
    assert holm(found) == [True, True, True, True]
    found[0] = with_p_value(0.026)  # the third; the fourth alone would have passed
    assert holm(found) == [False, True, False, True]
    assert holm([*found, None, with_p_value(0.9)]) == [False, True] + [False] * 4


def test_one_seed_and_no_difference_are_never_significant():
    assert holm([Difference(80, None, None, 1), Difference(0, 0, 0, 3)]) == [False] * 2
    assert holm([Difference(2, 2, 2, 3, 0.0)]) == [True]


@given(pairs=several)
def test_a_single_difference_is_significant_if_its_interval_excludes_zero(pairs):
    found = of_pairs(pairs)
    assert holm([found]) == [found.verdict != "undecided"]
