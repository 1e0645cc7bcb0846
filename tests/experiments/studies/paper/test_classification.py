"""Tab. 1: ours and the paper's accuracies by resolution."""

from __future__ import annotations

from itertools import product

from support.studies import plan_of, results_of, row_of, table_lines

from comrope.experiments.studies import STUDIES
from comrope.experiments.studies.reproduce import paper_figures
from comrope.experiments.studies.study import PUBLISHED


def made_up() -> dict:
    rows = [
        row_of({s: {"8": 50.0 + s, "16": 60.0} for s in range(2)}, method, perturbation=sigma)
        for method in ("ape", "comrope-torus")
        for sigma in (1.0, 0.0)
    ]
    return results_of(rows, paper=paper_figures())


def test_the_papers_rows_are_those_that_it_has():
    lines = table_lines(STUDIES["classification"].table(made_up()))
    assert ["comrope-torus (all commuting)", "0", "50.5 ± 0.7", "60.0 ± 0.0"] in lines
    assert [line[:3] for line in lines[-2:]] == [["APE", "1", "30.04"], ["APE", "0", "19.71"]]


def test_the_figure_has_a_panel_for_each_perturbation_and_one_for_the_paper():
    drawing = STUDIES["classification"].figure(made_up())
    assert len(drawing.axes) == 3
    (legend,) = drawing.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:3] == ["APE", "comrope-torus (all commuting)", "vanilla RoPE"]  # ours come first
    assert len(set(names)) == len(names)


def test_rows_are_all_methods_with_and_without_perturbation():
    rows = plan_of("classification", "tiny").rows
    assert {(row.method, row.perturbation) for row in rows} == set(product(PUBLISHED, (0.0, 1.0)))
    assert not any(row.fields for row in rows)
