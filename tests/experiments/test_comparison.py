"""The comparison of position encodings: its rows, its runs, and what its table dares to say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from comrope.experiments import launch
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies import PRESETS, STUDIES, Cell, run_name
from comrope.experiments.studies.fair import rows
from comrope.experiments.studies.fair.comparison import figure, pairs, table
from comrope.experiments.studies.plan import make_plan
from comrope.experiments.studies.reproduce import reproduce
from comrope.experiments.training.evaluate import build_model
from experiments.results import cell_of, results_of

pytestmark = pytest.mark.usefixtures("one_thread")
STUDY = STUDIES["comparison"]


def test_the_rows_and_their_seeds(tmp_path):
    rows = [(c.method, c.name, c.perturbation) for c in STUDY.cells(PRESETS["small"])]
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
        *((m, f"{n}, values and near", 1.0) for m, n in [
            ("rope", "vanilla RoPE"),
            ("rope-mixed", "RoPE-Mixed"),
            ("liere", "LieRE"),
            ("comrope-torus", "comrope-torus"),
        ]),
        ("rope", "vanilla RoPE, patch units, a quarter longer", 1.0),
        ("rope", "vanilla RoPE, values and near, a quarter longer", 1.0),
        ("none", "", 0.0),
    ]  # fmt: skip
    assert [STUDY.seeds(PRESETS[name]) for name in ("demo", "small", "paper")] == [3, 5, 1]
    rows = make_plan(STUDY, PRESETS["small"], tmp_path).rows
    assert {cell.perturbation: len(configs) for cell, configs in rows.items()} == {1.0: 5, 0.0: 3}
    rows = make_plan(STUDY, PRESETS["small"], tmp_path, seeds=4).rows
    assert {len(configs) for configs in rows.values()} == {4}
    units = {
        c.name: c.config(load_recipe("imagenette"), 0).model.position_units
        for c in STUDY.cells(PRESETS["small"])
        if c.method == "rope"
    }
    assert units == {
        "vanilla RoPE, relative units": "relative",
        "vanilla RoPE, patch units": "patch",
        "vanilla RoPE, values and near": "patch",
        "vanilla RoPE, patch units, a quarter longer": "patch",
        "vanilla RoPE, values and near, a quarter longer": "patch",
    }


def test_what_trains_longer_is_the_same_row_otherwise():
    for preset in ("tiny", "small"):
        recipe = load_recipe(PRESETS[preset].recipe)
        cells = {c.name: c for c in STUDY.cells(PRESETS[preset]) if c.perturbation}
        for row in ("vanilla RoPE, patch units", "vanilla RoPE, values and near"):
            plain = decisive(cells[row].config(recipe, 3))
            longer = decisive(cells[f"{row}, a quarter longer"].config(recipe, 3))
            changed = {name: value for name, value in longer.items() if value != plain[name]}
            assert changed == {"train.epochs": recipe.train.epochs * 5 // 4}


def test_what_trains_longer_stands_beside_what_takes_more_time_only():
    both = {"fields": {"model.rotate_values": True, "model.locality_bias": 4.0}}

    def cell(method, name, **about):
        return cell_of({0: {"8": 1.0, "16": 2.0}}, method, name=name, **about)

    cells = [
        cell("rope", "patch"), cell("comrope-torus", "plain"), cell("rope", "full", **both),
        cell("comrope-torus", "torus, full", **both), cell("rope", "longer", longer=1.25),
        cell("rope", "full, longer", longer=1.25, **both),
    ]  # fmt: skip
    beside = {(p.mine["name"], p.other["name"]) for p in pairs(results_of(cells))}
    assert beside == {
        ("plain", "patch"), ("torus, full", "patch"), ("torus, full", "longer"),
        ("torus, full", "full"), ("torus, full", "plain"), ("full", "patch"),
        ("torus, full", "full, longer"), ("full, longer", "longer"),
    }  # fmt: skip
    assert "for a quarter more epochs" in table(results_of(cells))
    assert "for a quarter more epochs" not in table(results_of(cells[:-2]))


def test_the_fields_of_a_row_come_last_and_a_command_cannot_set_them(tmp_path):
    fields = (("train.perturbation_per", "sample"), ("optim.lr", 0.5))
    config = Cell("liere", fields=fields).config(load_recipe("imagenette"), 3)
    assert (config.train.perturbation_per, config.optim.lr, config.train.seed) == ("sample", 0.5, 3)
    with pytest.raises(
        UserError, match=r"model.position_units: is what the rows of this study differ"
    ):
        make_plan(STUDY, PRESETS["demo"], tmp_path, overrides=["model.position_units=patch"])


def test_every_row_gets_what_a_search_found_for_it(monkeypatch):
    found = {"imagenette": {"vanilla RoPE, patch units": {"model.base": 100}, "none": None}}
    monkeypatch.setattr(rows, "packaged", {"fair/tuned.yaml": found}.__getitem__)
    for preset, wanted in (("small", 100), ("demo", None)):
        for cell in STUDY.cells(PRESETS[preset]):
            config = cell.config(load_recipe(PRESETS[preset].recipe), 0)
            if config.model.locality_bias:  # which has a start of its own
                continue
            assert config.model.base == (wanted if "patch" in cell.name else None)


def test_what_was_found_is_of_rows_that_are_there_and_can_be_built():
    known = {rows.row_key(row) for row in (*rows.ROWS, *rows.full_rows(), rows.CONTROL)}
    for recipe, found in rows.packaged("fair/tuned.yaml").items():
        assert set(found) <= known | {rows.EVERY}
        (preset,) = (p for p in PRESETS.values() if p.recipe == recipe)
        small = load_recipe("digits").with_overrides({"model.name": "vit_nano_patch4_12"})
        for cell in STUDY.cells(preset):
            build_model(cell.config(small, 0))


def test_rows_without_fields_of_their_own_share_the_runs_of_other_studies():
    base = load_recipe("imagenette")
    names = {
        study: {run_name(cell.config(base, 0)) for cell in STUDIES[study].cells(PRESETS["small"])}
        for study in ("classification", "comparison", "ablation")
    }
    untuned = {
        run_name(cell.config(base, 0))
        for cell in STUDY.cells(PRESETS["small"])
        if not cell.fields and cell.method != "none"
    }
    assert untuned <= names["classification"]
    assert len(names["ablation"] & names["comparison"]) == 4  # as they are, with noise and without


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


def test_the_demo_writes_results_table_and_figure(demo):
    results, folder = demo
    written = json.loads((folder / "results.json").read_text())
    cells = {(cell["method"], cell["name"]): cell["fields"] for cell in written["cells"]}
    assert len(cells) == 15
    assert cells["rope", "vanilla RoPE, relative units"] == {"model.position_units": "relative"}
    assert cells["comrope-ld", ""] == {}
    text = (folder / "table.md").read_text()
    assert text.startswith("# Position encodings compared\n")
    assert "of the paper" not in text
    assert "| vanilla RoPE, patch units | 1 |" in text
    differences = re.findall(r"\| ([^|]+) \| ([^|]+) \| 1 \| [+-][\d.]+ \[.*?\] \| (\w+) \|", text)
    # Three that are plain over six baselines, one with all over those, three with as much and two
    # that train longer, and four with all over themselves without, one of which trains longer too.
    assert len(differences) == 3 * 6 + 11 + 5
    assert (folder / "figure.png").stat().st_size > 50_000
    mine, other = (next(c for c in results["cells"] if c["method"] == m)
                   for m in ("comrope-ld", "ape"))  # fmt: skip
    mean = sum(
        sum(run["top1"].values()) / 2 - sum(rival["top1"].values()) / 2
        for run, rival in zip(mine["runs"], other["runs"], strict=True)
    ) / 2  # fmt: skip
    assert re.search(rf"\| ComRoPE-LD \| APE \| 1 .*\| {re.escape(f'{mean:+.2f}')} \[", text)


def test_the_two_readings_of_vanilla_rope_are_two_models(demo):
    results, folder = demo
    read, used, *_ = (c["runs"][0]["run"] for c in results["cells"] if c["method"] == "rope")
    runs = folder.parent / "runs"
    one, two = (decisive(load_recipe(runs / name / "config.yaml")) for name in (read, used))
    assert {name for name in one if one[name] != two[name]} == {"model.position_units"}


def made_up() -> dict:
    """Of three seeds, where ComRoPE-LD is better by two points, give or take nothing."""
    hard = {0: 0.0, 1: -5.0, 2: 3.0}  # seeds differ more than methods do

    def cell(method, level, **about):
        top1 = {s: {"8": level + hard[s] - 10, "16": level + hard[s] + 0.01 * s} for s in hard}
        return cell_of(top1, method, **about)

    return results_of(
        [
            cell("ape", 70),
            cell("comrope-ld", 72),
            cell("comrope-ld", 60, perturbation=0.0),
            cell("ape", 61, perturbation=0.0),
            cell("none", 66, perturbation=0.0),
            cell("comrope-torus", 70),
        ]
    )


def test_pairs_have_the_same_noise_and_a_control_has_any():
    found = pairs(made_up())
    told = {(p.mine["method"], p.mine["perturbation"], p.other["method"]) for p in found}
    assert told == {
        ("comrope-ld", 1.0, "ape"),
        ("comrope-ld", 1.0, "none"),
        ("comrope-ld", 0.0, "ape"),
        ("comrope-ld", 0.0, "none"),
        ("comrope-torus", 1.0, "ape"),
        ("comrope-torus", 1.0, "none"),
        ("ape", 1.0, "ape"),  # with noise over itself without
        ("comrope-ld", 1.0, "comrope-ld"),
    }
    assert all(pair.other["perturbation"] in (0.0, pair.mine["perturbation"]) for pair in found)


def test_what_is_plain_does_not_stand_beside_what_has_more():
    results, more = made_up(), {"fields": {"model.rotate_values": True, "model.locality_bias": 4.0}}
    full = {m: cell_of({0: {"8": 1.0, "16": 2.0}}, m, name=f"{m}, full", **more)
            for m in ("rope", "comrope-torus")}  # fmt: skip
    results["cells"] += full.values()
    beside = {(p.mine["name"], p.other["name"] or p.other["method"]) for p in pairs(results)}
    assert ("comrope-torus, full", "rope, full") in beside
    assert ("comrope-torus, full", "ape") in beside
    assert ("", "rope, full") not in beside
    assert ("comrope-torus, full", "comrope-torus") in beside


def test_what_is_added_to_vanilla_rope_is_added_to_it_in_patches():
    def rope(name, level, **about):
        return cell_of({0: {"8": level, "16": level}}, "rope", name=name, **about)

    both = {"fields": {"model.rotate_values": True, "model.locality_bias": 4.0}}
    silent = rope("patch", 3.0, perturbation=0.0)
    cells = [rope("relative", 1.0), rope("patch", 2.0), silent, rope("full", 4.0, **both)]
    added, noise = pairs(results_of(cells))
    assert (added.mine["name"], added.other["name"], added.mean.mean) == ("full", "patch", 2.0)
    assert (noise.mine["name"], noise.other["name"], noise.mean.mean) == ("patch", "patch", -1.0)


def test_the_words_in_the_table_are_those_of_the_intervals():
    text = table(made_up())
    assert "| ComRoPE-LD | APE | 1 | +2.00 [+2.00, +2.00] | **better** |" in text
    assert "| ComRoPE-LD | APE | 0 | -1.00 [-1.00, -1.00] | **worse** |" in text
    assert "| comrope-torus (all commuting) | APE | 1 | +0.00 [+0.00, +0.00] | undecided |" in text
    assert "| ComRoPE-LD | 1 | 61.3 ± 4.0 | 71.3 ± 4.0 | 66.3 ± 4.0 |" in text


def test_what_is_decided_only_by_itself_is_not_bold():
    """Two differences of five seeds each, of which neither is sure enough to be asked with the
    other; one of another row does not count."""
    noise = (1.0, -1.0, 0.5, -0.5, 0.0)

    def cell(method, level, spread):
        by_seed = {s: level + spread * noise[s] for s in range(5)}
        return cell_of({s: {"8": value, "16": value} for s, value in by_seed.items()}, method)

    cells = [cell("ape", 50, 0), cell("comrope-ld", 51.1, 1), cell("comrope-ap", 9, 0)]
    text, alone = table(results_of(cells)), "+1.10 [+0.12, +2.08] | better"
    assert f"| ComRoPE-LD | APE | 1 | {alone} | {alone} |" in text
    assert "| ComRoPE-AP | APE | 1 | -41.00 [-41.00, -41.00] | **worse** |" in text


def test_what_is_asked_at_once_is_of_one_kind():
    """With noise, without, or what noise makes: a difference that is sure enough among two is not
    held to those of another kind."""
    noise = (1.0, -1.0, 0.5, -0.5, 0.0)

    def cell(method, level, spread, sigma):
        by_seed = {s: level + spread * noise[s] for s in range(5)}
        views = {s: {"8": value, "16": value} for s, value in by_seed.items()}
        return cell_of(views, method, perturbation=sigma)

    silent = [cell("ape", 50, 0, 0.0), cell("comrope-ld", 51.5, 1, 0.0)]
    noisy = [cell(method, 50, 0, 1.0) for method in ("ape", "comrope-ld", "comrope-ap")]
    alone = "+1.50 [+0.52, +2.48] | **better**"
    text = table(results_of([*silent, *noisy]))
    assert f"| ComRoPE-LD | APE | 0 | {alone} | {alone} |" in text
    assert "| ComRoPE-LD | itself without noise | 1 | -1.50 [-2.48, -0.52] | worse |" in text
    told = (
        "all differences with σ = 0, or all with σ = 1, or all that noise makes are asked at once"
    )
    assert told in text
    assert "all differences of the table are asked" in table(results_of(silent))


def test_each_of_the_two_differences_is_bold_by_itself():
    """Two points at 16 px, always; at 8 px anything, so that the mean is not decided."""
    anything = (9.0, -9.0, 5.0)
    mine = {s: {"8": 50 + anything[s], "16": 52.0} for s in range(3)}
    cells = [cell_of({s: {"8": 50.0, "16": 50.0} for s in range(3)}), cell_of(mine, "comrope-ld")]
    text = table(results_of(cells))
    assert "| +2.00 [+2.00, +2.00] | **better** | +1.83 [-9.91, +13.57] | undecided |" in text


def test_the_table_says_what_it_was_validated_on():
    results = made_up()
    assert "on 0.2 of the training images, which were kept out of training, by" in table(results)
    results["recipe"]["data"] = {}  # from before there was such a field
    assert "on the validation set, by evaluation resolution" in table(results)


def test_baselines_alone_have_no_differences(tmp_path):
    results = made_up()
    baselines = [cell for cell in results["cells"] if "comrope" not in cell["method"]]
    results["cells"] = [c for c in baselines if c["method"] == "none" or c["perturbation"]]
    assert "Differences" not in table(results)
    save(figure(results), Path(tmp_path / "figure.png"))
