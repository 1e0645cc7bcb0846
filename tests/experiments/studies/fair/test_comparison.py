"""The comparison of position encodings: its rows, its runs, and what its table dares to say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.studies import results_of, row_of, table_lines

from comrope.experiments import launch
from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies import PRESETS, STUDIES
from comrope.experiments.studies.fair.comparison import brief_figure, brief_table
from comrope.experiments.studies.fair.rows import EXTENSIONS
from comrope.experiments.studies.reproduce import reproduce

pytestmark = pytest.mark.usefixtures("one_thread")
STUDY = STUDIES["comparison"]
table, figure = STUDY.table, STUDY.figure
BOTH = dict.fromkeys(EXTENSIONS, 1.0)


def test_the_rows_and_their_seeds():
    rows = [(r.method, r.label, r.perturbation) for r in STUDY.rows(PRESETS["small"])]
    assert rows == [
        *((m, n, p) for m, n in [
            ("ape", ""),
            ("rope", "vanilla RoPE, relative units"),
            ("rope", "vanilla RoPE, patch units"),
            ("rope-mixed", ""),
            ("liere", ""),
            ("comrope-ap", ""),
            ("comrope-ld", ""),
            ("comrope-torus", ""),
        ] for p in (1.0, 0.0)),
        *((m, f"{n}, extended", 1.0) for m, n in [
            ("rope", "vanilla RoPE"),
            ("rope-mixed", "RoPE-Mixed"),
            ("liere", "LieRE"),
            ("comrope-torus", "comrope-torus"),
        ]),
        ("rope", "vanilla RoPE, patch units, 1.25× epochs", 1.0),
        ("rope", "vanilla RoPE, extended, 1.25× epochs", 1.0),
        ("none", "", 0.0),
    ]  # fmt: skip
    assert [STUDY.seeds(PRESETS[name]) for name in ("demo", "small", "paper")] == [3, 5, 1]
    units = {
        row.label: row.config(load_recipe("imagenette"), 0).model.position_units
        for row in STUDY.rows(PRESETS["small"])
        if row.method == "rope"
    }
    assert units == {
        "vanilla RoPE, relative units": "relative",
        "vanilla RoPE, patch units": "patch",
        "vanilla RoPE, extended": "patch",
        "vanilla RoPE, patch units, 1.25× epochs": "patch",
        "vanilla RoPE, extended, 1.25× epochs": "patch",
    }


def test_rows_with_more_epochs_differ_in_epochs_only():
    for preset in ("tiny", "small"):
        recipe = load_recipe(PRESETS[preset].recipe)
        rows = {row.label: row for row in STUDY.rows(PRESETS[preset]) if row.perturbation}
        for row in ("vanilla RoPE, patch units", "vanilla RoPE, extended"):
            plain = decisive(rows[row].config(recipe, 3))
            longer = decisive(rows[f"{row}, 1.25× epochs"].config(recipe, 3))
            changed = {name: value for name, value in longer.items() if value != plain[name]}
            assert changed == {"train.epochs": recipe.train.epochs * 5 // 4}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """All rows, a step each, in this process."""
    out = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "slots", lambda device, per_gpu: [launch.Slot(None, 1)])
        results = reproduce(
            "comparison",
            out=out,
            seeds=2,
            overrides=("model.name=vit_nano_patch4_12", "train.epochs=1", "train.batch_size=720",
                       "evaluate.resolutions=8,12"),
            progress=False,
        )  # fmt: skip
    (folder,) = out.glob("comparison-*")
    return results, folder


@pytest.mark.slow
def test_the_demo_writes_results_table_and_figure(demo):
    results, folder = demo
    written = json.loads((folder / "results.json").read_text())
    rows = {(row["method"], row["label"]): row["fields"] for row in written["rows"]}
    assert len(rows) == 15
    assert rows["rope", "vanilla RoPE, relative units"] == {"model.position_units": "relative"}
    assert rows["comrope-ld", ""] == {}
    text = (folder / "table.md").read_text()
    assert text.startswith("# Position encodings compared\n")
    assert "of the paper" not in text
    assert "| vanilla RoPE, patch units | 1 |" in text
    differences = re.findall(r"\| ([^|]+) \| ([^|]+) \| 1 \| [+-][\d.]+ \[.*?\] \| (\w+) \|", text)
    # Three plain rows with six baselines; the extended one with those, three extended baselines and
    # two with more epochs; and five extended rows with themselves.
    assert len(differences) == 3 * 6 + 11 + 5
    assert (folder / "figure.png").stat().st_size > 50_000
    mine, other = (next(r for r in results["rows"] if r["method"] == m)
                   for m in ("comrope-ld", "ape"))  # fmt: skip
    mean = sum(
        sum(run["top1"].values()) / 2 - sum(rival["top1"].values()) / 2
        for run, rival in zip(mine["runs"], other["runs"], strict=True)
    ) / 2  # fmt: skip
    assert re.search(rf"\| ComRoPE-LD \| APE \| 1 .*\| {re.escape(f'{mean:+.2f}')} \[", text)


@pytest.mark.slow
def test_the_two_readings_of_vanilla_rope_are_two_models(demo):
    results, folder = demo
    read, used, *_ = (r["runs"][0]["run"] for r in results["rows"] if r["method"] == "rope")
    runs = folder.parent / "runs"
    one, two = (decisive(load_recipe(runs / name / "config.yaml")) for name in (read, used))
    assert {name for name in one if one[name] != two[name]} == {"model.position_units"}


def made_up() -> dict:
    """Three seeds, of which each has ComRoPE-LD two points above APE."""
    hard = {0: 0.0, 1: -5.0, 2: 3.0}  # seeds differ more than methods do

    def row(method, level, **about):
        top1 = {s: {"8": level + hard[s] - 10, "16": level + hard[s] + 0.01 * s} for s in hard}
        return row_of(top1, method, **about)

    return results_of(
        [
            row("ape", 70),
            row("comrope-ld", 72),
            row("comrope-ld", 60, perturbation=0.0),
            row("ape", 61, perturbation=0.0),
            row("none", 66, perturbation=0.0),
            row("comrope-torus", 70),
        ]
    )


def test_verdicts_are_those_of_the_intervals():
    text = table(made_up())
    assert "| ComRoPE-LD | APE | 1 | +2.00 [+2.00, +2.00] | **better** |" in text
    assert "| ComRoPE-LD | APE | 0 | -1.00 [-1.00, -1.00] | **worse** |" in text
    assert "| comrope-torus (all commuting) | APE | 1 | +0.00 [+0.00, +0.00] | undecided |" in text
    assert "| ComRoPE-LD | 1 | 61.3 ± 4.0 | 71.3 ± 4.0 | 66.3 ± 4.0 |" in text


def test_what_is_not_significant_after_correction_is_not_bold():
    """Two differences of five seeds each, of which neither is significant with the other."""
    noise = (1.0, -1.0, 0.5, -0.5, 0.0)

    def row(method, level, spread):
        by_seed = {s: level + spread * noise[s] for s in range(5)}
        return row_of({s: {"8": value, "16": value} for s, value in by_seed.items()}, method)

    rows = [row("ape", 50, 0), row("comrope-ld", 51.1, 1), row("comrope-ap", 9, 0)]
    text, alone = table(results_of(rows)), "+1.10 [+0.12, +2.08] | better"
    assert f"| ComRoPE-LD | APE | 1 | {alone} | {alone} |" in text
    assert "| ComRoPE-AP | APE | 1 | -41.00 [-41.00, -41.00] | **worse** |" in text


def test_the_correction_is_over_differences_of_one_family():
    """With perturbation, without, or between the two: families are corrected on their own."""
    noise = (1.0, -1.0, 0.5, -0.5, 0.0)

    def row(method, level, spread, sigma):
        by_seed = {s: level + spread * noise[s] for s in range(5)}
        views = {s: {"8": value, "16": value} for s, value in by_seed.items()}
        return row_of(views, method, perturbation=sigma)

    silent = [row("ape", 50, 0, 0.0), row("comrope-ld", 51.5, 1, 0.0)]
    noisy = [row(method, 50, 0, 1.0) for method in ("ape", "comrope-ld", "comrope-ap")]
    alone = "+1.50 [+0.52, +2.48] | **better**"
    text = table(results_of([*silent, *noisy]))
    assert f"| ComRoPE-LD | APE | 0 | {alone} | {alone} |" in text
    assert "| ComRoPE-LD | itself without perturbation | 1 | -1.50 [-2.48, -0.52] | worse |" in text
    families = "with σ = 0, or all with σ = 1, or all between perturbation and none"
    assert f"Holm correction over all differences {families}" in text
    assert "Holm correction over all differences of the table" in table(results_of(silent))


def test_each_of_the_two_differences_is_bold_by_itself():
    """Two points at 16 px, always; at 8 px anything, so that the mean is not decided."""
    anything = (9.0, -9.0, 5.0)
    mine = {s: {"8": 50 + anything[s], "16": 52.0} for s in range(3)}
    rows = [row_of({s: {"8": 50.0, "16": 50.0} for s in range(3)}), row_of(mine, "comrope-ld")]
    text = table(results_of(rows))
    assert "| +2.00 [+2.00, +2.00] | **better** | +1.83 [-9.91, +13.57] | undecided |" in text


def test_baselines_alone_have_no_differences(tmp_path):
    results = made_up()
    baselines = [row for row in results["rows"] if "comrope" not in row["method"]]
    results["rows"] = [r for r in baselines if r["method"] == "none" or r["perturbation"]]
    assert "Differences" not in table(results)
    save(figure(results), Path(tmp_path / "figure.png"))


def leveled(method: str, level: float, seeds: int = 3, **about) -> dict:
    """At 16 px higher by two; seeds differ more than methods do."""
    top1 = {s: {"8": level + 5 * s, "16": level + 5 * s + 2} for s in range(seeds)}
    return row_of(top1, method, **about)


def extended(method: str, level: float, **about) -> dict:
    return leveled(method, level, label=f"{method}, extended", fields=BOTH, **about)


ROWS = [
    leveled("ape", 40),
    leveled("ape", 90, perturbation=0.0),
    leveled("rope", 41, label="vanilla RoPE, relative units"),
    leveled("rope", 43, label="vanilla RoPE, patch units"),
    leveled("comrope-torus", 42),
    extended("rope", 47),
    extended("comrope-torus", 46),
    leveled("none", 30, perturbation=0.0),
]


def brief_lines(rows: list[dict], **about) -> dict[str, list[str]]:
    return {name: line for name, *line in table_lines(brief_table(results_of(rows, **about)))}


def test_the_brief_table_has_a_line_a_method_without_and_with_extensions():
    lines = brief_lines(ROWS)
    assert len(lines["method"]) == 6
    assert lines["APE"] == ["47.0 ± 5.0", "46.0 ± 5.0", "–", "–", "+6.00 [+6.00, +6.00]", "–"]
    assert lines["vanilla RoPE, relative units"][2:4] == ["–", "–"]
    assert lines["vanilla RoPE, patch units"] == [
        "50.0 ± 5.0", "49.0 ± 5.0", "54.0 ± 5.0", "53.0 ± 5.0",
        "+3.00 [+3.00, +3.00]", "-1.00 [-1.00, -1.00]",
    ]  # fmt: skip
    ours = lines["comrope-torus (all commuting)"]
    assert ours[2:] == ["53.0 ± 5.0", "52.0 ± 5.0", "+4.00 [+4.00, +4.00]", "–"]
    assert lines["no positions"][4] == "+16.00 [+16.00, +16.00]"
    assert len(lines) == 1 + 5 + 1


def test_the_brief_table_describes_its_numbers():
    text = brief_table(results_of(ROWS, missing=["LieRE"]))
    for part in ("σ = 1", "Mean ± standard deviation of 3 seeds.", "Not run yet: LieRE.\n"):
        assert part in text
    methods = [leveled("ape", 1, seeds=1), leveled("comrope-torus", 0, seeds=1)]
    one = brief_table(results_of([*methods, extended("comrope-torus", 2, seeds=1)]))
    assert "One seed." in one
    assert "| +1.00 |" in one


def test_the_brief_table_without_an_extended_row_of_ours_has_no_differences():
    rows = [leveled("ape", 40), leveled("comrope-torus", 42), extended("rope", 47)]
    lines = brief_lines(rows)
    assert len(lines["method"]) == 4
    assert lines["comrope-torus (all commuting)"] == ["49.0 ± 5.0", "48.0 ± 5.0", "–", "–"]


def test_the_brief_figure_has_a_mark_for_each_row(tmp_path):
    drawing = brief_figure(results_of(ROWS))
    (axis,) = drawing.axes
    assert len(axis.containers) == 8 - 1  # rows without perturbation are left out
    assert next(text.get_text() for text in axis.get_yticklabels()) == "APE"
    save(drawing, tmp_path / "brief.png")


def test_the_figure_has_a_panel_of_differences_below_each_of_accuracies(tmp_path):
    drawing = figure(made_up())
    assert len(drawing.axes) == 4
    save(drawing, tmp_path / "figure.png")


def test_notes_are_there_where_they_apply():
    text = table(results_of(ROWS))
    assert "*Extended*" in text
    assert "1.25" not in text
    assert "gain of the extensions" in text
    longer = leveled("rope", 44, label="longer", epochs=1.25)
    assert "*1.25× epochs*" in table(results_of([*ROWS, longer]))
    assert "*Extended*" not in table(made_up())
