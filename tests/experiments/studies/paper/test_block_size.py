"""Block sizes and perturbations: each compared with the smallest of its method."""

from __future__ import annotations

from support.studies import results_of, row_of, table_lines

from comrope.experiments.studies import STUDIES
from comrope.experiments.studies.reproduce import paper_figures


def swept(key: str, values: tuple[float, ...], study: str) -> dict:
    def row(method, value, more):
        views = {s: {"8": 50.0 + s + more, "16": 60.0 + s} for s in range(3)}
        return row_of(views, method, **{key: value})

    rows = [row(m, v, 2.0 * n) for m in ("ape", "comrope-ld") for n, v in enumerate(values)]
    return results_of(rows, study=study, title=study, paper=paper_figures())


def test_each_is_compared_with_the_smallest_of_its_method():
    results = swept("perturbation", (0.0, 0.25, 1.0), "perturbation")
    results["rows"].reverse()  # whatever comes first
    text = STUDIES["perturbation"].table(results)
    lines, zero = table_lines(text), ["+0.00 [+0.00, +0.00]", "undecided"]
    two = ["+2.00 [+2.00, +2.00]", "better"]
    assert ["ComRoPE-LD", "1", "σ = 0", *zero, *two] in lines
    assert ["ComRoPE-LD", "0.25", "σ = 0", *zero, "+1.00 [+1.00, +1.00]", "better"] in lines
    assert not any(line[:3] == ["ComRoPE-LD", "0", "σ = 0"] for line in lines)
    assert text.count("| APE |") == 3 + 2 + 2  # accuracies, the paper's, differences
    assert len(STUDIES["perturbation"].figure(results).axes) == 2


def test_one_block_size_alone_is_compared_with_nothing():
    table, results = STUDIES["block-size"].table, swept("block_size", (8, 2), "block-size")
    zero = ["+0.00 [+0.00, +0.00]", "undecided"]
    line = ["ComRoPE-LD", "8", "blocks of 2", *zero, "-1.00 [-1.00, -1.00]", "worse"]
    assert line in table_lines(table(results))
    assert "were searched" not in table(results)  # settings are the recipe's
    results["rows"][-1] |= {"fields": {"model.base": 10}}
    results["rows"][-2]["runs"].pop()
    assert "were searched with blocks of 8" in table(results)
    line = ["ComRoPE-LD", "8", "blocks of 2", "2", *zero, "-1.00 [-1.00, -1.00]", "worse"]
    assert line in table_lines(table(results))
    results["rows"] = [row for row in results["rows"] if row["block_size"] == 8]
    assert "Differences" not in table(results)
