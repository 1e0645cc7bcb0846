"""Parts of figures: what is drawn is what the results say."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.studies import results_of, row_of

from comrope.experiments.common.figures import STYLES
from comrope.experiments.studies.plots import (
    Line,
    accuracy_curves,
    curve,
    draw_forest,
    method_style,
)
from comrope.experiments.studies.stats import Difference
from comrope.experiments.studies.tables import spread


@pytest.fixture
def axis():
    return Figure().subplots()


def test_a_curve_has_means_and_a_band_of_one_deviation(axis):
    curve(axis, [8, 16], [spread([1.0, 3.0]), spread([5.0, 5.0])], color="red", marker="o")
    (line,) = axis.lines
    assert line.get_xydata().tolist() == [[8, 2], [16, 5]]
    (band,) = axis.collections
    points = band.get_paths()[0].vertices
    deviation = np.std([1.0, 3.0], ddof=1)
    assert points[points[:, 0] == 8][:, 1].min() == pytest.approx(2 - deviation)
    assert points[points[:, 0] == 16][:, 1].max() == 5


def test_one_seed_has_no_band(axis):
    curve(axis, [8], [spread([1.0])], color="red")
    assert not axis.collections


def test_accuracy_has_a_curve_for_each_row(axis):
    rows = [row_of({0: {"8": 40.0, "16": 50.0}}, method) for method in ("ape", "liere")]
    accuracy_curves(axis, results_of(rows), rows, method_style)
    ape, liere, trained_at = axis.lines
    assert ape.get_ydata().tolist() == [40, 50]
    assert liere.get_color() == STYLES["liere"]["color"]
    assert trained_at.get_xdata()[0] == 16


def test_a_forest_has_both_differences_and_their_intervals(axis):
    style = method_style(row_of({0: {"8": 1.0, "16": 1.0}}, "comrope-ld"))
    known = Difference(1.0, 0.5, 1.5, seeds=3)
    alone = Difference(-2.0, None, None, seeds=1)
    draw_forest(axis, [Line("one", style, known, alone), Line("two", style, None, known)], "16")
    marks = [line.get_xydata()[0] for line in axis.lines if line.get_marker() == "o"]
    assert [(x, round(y, 2)) for x, y in marks] == [(-2, -0.15), (1, 0.2), (1, 0.85)]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["one", "two"]
    assert "16 px" in axis.get_xlabel()
