"""Which rows of the study of language models are compared."""

from __future__ import annotations

from support.language_results import made_up_results

from comrope.experiments.studies.fair.language_pairs import SUFFIX, compared_views, pairs_of
from comrope.experiments.studies.tables import row_name


def test_rows_are_compared_with_the_searched_base_and_with_themselves_without_values():
    pairs = [(row_name(mine), row_name(other)) for mine, other, *_ in pairs_of(made_up_results())]
    assert pairs == [
        ("RoPE, base 10,000", "RoPE, base 60"),
        ("p-RoPE", "RoPE, base 60"),
        ("LD", "RoPE, base 60"),
        ("LD" + SUFFIX, "RoPE, base 60" + SUFFIX),
        ("RoPE, base 60" + SUFFIX, "RoPE, base 60"),
        ("LD" + SUFFIX, "LD"),
    ]


def test_differences_are_at_and_beyond_the_training_length():
    results = made_up_results()
    assert compared_views(results) == ("256", "1024")
    pairs = {(row_name(pair.mine), row_name(pair.other)): pair for pair in pairs_of(results)}
    pair = pairs["RoPE, base 10,000", "RoPE, base 60"]
    assert all(0.09 < found.mean < 0.11 for found in pair.differences)
    assert pair.same_kind
    assert not pairs["LD" + SUFFIX, "LD"].same_kind
    assert any(pair.significant)
