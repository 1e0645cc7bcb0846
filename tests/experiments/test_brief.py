"""The short table of the comparison: every method without and with the extensions."""

from __future__ import annotations

from comrope.experiments.common.figures import save
from comrope.experiments.studies.fair import brief
from experiments.results import cell_of, results_of

BOTH = {"model.rotate_values": True, "model.locality_bias": 4.0}


def cell(method: str, level: float, seeds: int = 3, **about) -> dict:
    """At 16 px higher by two; seeds differ more than methods do."""
    top1 = {s: {"8": level + 5 * s, "16": level + 5 * s + 2} for s in range(seeds)}
    return cell_of(top1, method, **about)


def full(method: str, level: float, **about) -> dict:
    return cell(method, level, name=f"{method}, values and near", fields=BOTH, **about)


def lines(cells: list[dict], **about) -> dict[str, list[str]]:
    text = brief.table(results_of(cells, **about))
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: row for name, *row in found}


CELLS = [
    cell("ape", 40),
    cell("ape", 90, perturbation=0.0),
    cell("rope", 41, name="vanilla RoPE, relative units"),
    cell("rope", 43, name="vanilla RoPE, patch units"),
    cell("comrope-torus", 42),
    full("rope", 47),
    full("comrope-torus", 46),
    cell("none", 30, perturbation=0.0),
]


def test_every_method_has_a_row_without_and_with_the_extensions():
    rows = lines(CELLS)
    assert rows["method"] == [
        "16 px", "mean", "extended, 16 px", "extended, mean", "difference",
        "difference, extended",
    ]  # fmt: skip
    assert rows["APE"] == ["47.0 ± 5.0", "46.0 ± 5.0", "–", "–", "+6.00 [+6.00, +6.00]", "–"]
    assert rows["vanilla RoPE, relative units"][2:4] == ["–", "–"]
    assert rows["vanilla RoPE, patch units"] == [
        "50.0 ± 5.0", "49.0 ± 5.0", "54.0 ± 5.0", "53.0 ± 5.0",
        "+3.00 [+3.00, +3.00]", "-1.00 [-1.00, -1.00]",
    ]  # fmt: skip
    ours = rows["comrope-torus (all commuting)"]
    assert ours[2:] == ["53.0 ± 5.0", "52.0 ± 5.0", "+4.00 [+4.00, +4.00]", "–"]
    assert rows["no positions"][4] == "+16.00 [+16.00, +16.00]"
    assert len(rows) == 1 + 5 + 1


def test_the_caption_describes_the_numbers():
    text = brief.table(results_of(CELLS, missing=["LieRE"]))
    assert "σ = 1" in text
    assert "which any rotation can have" in text
    assert "Mean ± standard deviation of 3 seeds." in text
    assert text.endswith("Not run yet: LieRE.\n")
    methods = [cell("ape", 1, seeds=1), cell("comrope-torus", 0, seeds=1)]
    one = brief.table(results_of([*methods, full("comrope-torus", 2, seeds=1)]))
    assert "One seed." in one
    assert "| +1.00 |" in one


def test_the_figure_has_a_mark_for_each_row(tmp_path):
    drawing = brief.figure(results_of(CELLS))
    (axis,) = drawing.axes
    assert len(axis.containers) == 8 - 1  # rows without perturbation are left out
    assert next(text.get_text() for text in axis.get_yticklabels()) == "APE"
    save(drawing, tmp_path / "brief.png")


def test_without_an_extended_row_of_ours_there_are_no_differences():
    rows = lines([cell("ape", 40), cell("comrope-torus", 42), full("rope", 47)])
    assert rows["method"] == ["16 px", "mean", "extended, 16 px", "extended, mean"]
    assert rows["comrope-torus (all commuting)"] == ["49.0 ± 5.0", "48.0 ± 5.0", "–", "–"]
