"""Blocks and noise of several sizes: a table that compares, and a figure that shows the spread."""

from __future__ import annotations

from comrope.experiments.studies import tables
from comrope.experiments.studies.paper import sweeps
from comrope.experiments.studies.plots import draw
from comrope.experiments.studies.reproduce import paper_figures
from experiments.results import cell_of, results_of


def swept(key: str, values: tuple[float, ...], study: str, title: str) -> dict:
    def cell(method, value, more):
        views = {s: {"8": 50.0 + s + more, "16": 60.0 + s} for s in range(3)}
        return cell_of(views, method, **{key: value})

    cells = [cell(m, v, 2.0 * n) for m in ("ape", "comrope-ld") for n, v in enumerate(values)]
    return results_of(cells, study=study, title=title, paper=paper_figures())


def test_each_is_compared_with_the_least_of_its_method(tmp_path):
    results = swept("perturbation", (0.0, 0.25, 1.0), "perturbation", "Perturbation intensity")
    results["cells"].reverse()  # whatever comes first
    text = sweeps.table(results)
    zero = "+0.00 [+0.00, +0.00] | undecided"
    assert f"| ComRoPE-LD | 1 | σ = 0 | {zero} | +2.00 [+2.00, +2.00] | better |" in text
    assert f"| ComRoPE-LD | 0.25 | σ = 0 | {zero} | +1.00 [+1.00, +1.00] | better |" in text
    assert "| ComRoPE-LD | 0 | σ" not in text
    assert text.count("| APE |") == 3 + 2 + 2  # accuracies, the paper's, differences
    draw("perturbation", results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_blocks_are_told_apart_and_one_alone_is_compared_with_nothing():
    results = swept("block_size", (8, 2), "block-size", "Block size")
    text = tables.table("block-size", results)
    assert "| ComRoPE-LD | 8 | blocks of 2 | +0.00 [+0.00, +0.00] | undecided | -1.00" in text
    assert "Settings were searched" not in text  # the recipe's
    results["cells"][-1] |= {"fields": {"model.base": 10}}
    results["cells"][-2]["runs"].pop()
    text = tables.table("block-size", results)
    assert "Settings were searched with blocks of 8 and σ = 1" in text
    assert "| ComRoPE-LD | 8 | blocks of 2 | 2 | +0.00 [+0.00, +0.00] | undecided |" in text
    results["cells"] = [cell for cell in results["cells"] if cell["block_size"] == 8]
    assert "Differences" not in tables.table("block-size", results)
