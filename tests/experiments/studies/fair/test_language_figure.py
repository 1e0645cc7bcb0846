"""The figure of the study of language models, from made-up results."""

from __future__ import annotations

import pytest
from support.language_results import made_up_results

from comrope.experiments.common.figures import save
from comrope.experiments.studies.fair.language_figure import _limits, figure
from comrope.experiments.studies.stats import Difference


def title_of(drawing) -> str:
    return drawing.get_suptitle()


def test_the_title_counts_the_significant_differences(tmp_path):
    drawing = figure(made_up_results())
    # Of four rows, LD is better, base 10,000 and p-RoPE are worse, and LD with values is worse.
    assert "Of 4 rows" in title_of(drawing)
    assert "1 better and 3 worse at 256 tokens" in title_of(drawing)
    save(drawing, tmp_path / "figure.png")


@pytest.mark.parametrize("kept", ["one seed", "no reference", "no rotated values"])
def test_results_may_be_incomplete(kept, tmp_path):
    results = made_up_results()
    if kept == "one seed":
        for row in results["rows"]:
            row["runs"] = row["runs"][:1]
        assert "Made up" in title_of(figure(results))
    elif kept == "no reference":
        results["rows"] = [row for row in results["rows"] if row["method"] != "rope"]
    else:
        results["rows"] = results["rows"][:5]
    save(figure(results), tmp_path / "figure.png")


def test_an_interval_that_is_too_wide_is_cut_off_and_means_are_shown():
    narrow = [Difference(x, x - 0.1, x + 0.1, 3) for x in (-0.2, 0.0, 0.1)]
    low, high = _limits(narrow)
    assert low < -0.3
    assert high > 0.2
    assert _limits([*narrow, None, Difference(1.5, -9.0, 12.0, 3)])[0] > -2
    assert 1.5 < _limits([*narrow, Difference(1.5, -9.0, 12.0, 3)])[1] < 3
