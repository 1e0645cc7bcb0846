"""The search before the comparison, and the ablation after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies import PRESETS, STUDIES, ablation
from comrope.experiments.studies.fair import rows, tuning
from comrope.experiments.studies.plan import make_plan
from comrope.experiments.studies.reproduce import Asked, gathered
from comrope.experiments.training.evaluate import build_model
from experiments.results import cell_of, results_of

ROOT = Path(__file__).parent.parent.parent
TINY = ["model.name=vit_nano_patch4_12", "evaluate.resolutions=12"]
ROWS = {rows.row_key(row): row for row in rows.ROWS}
FULL = {row.name: row for row in rows.full_rows()}


def planned(name: str, preset: str = "demo"):
    return make_plan(STUDIES[name], PRESETS[preset], None, overrides=TINY)


def test_every_row_that_has_something_to_tune_has_as_many_trials():
    trials = rows.packaged("fair/search.yaml")
    assert set(trials) == {*ROWS, *FULL}
    for some in trials.values():
        assert len({tuple(sorted(trial.items())) for trial in some}) == len(some) == 6


@pytest.mark.parametrize("preset", PRESETS)
def test_one_trial_is_the_recipe_as_it_is(preset):
    """So a search can find that nothing needs to be changed."""
    recipe = load_recipe(PRESETS[preset].recipe)

    def said(cell) -> dict:
        fields = decisive(cell.config(recipe, 0))
        return {**fields, "model.base": fields["model.base"] or 10000}

    common = rows._found(rows.EVERY, PRESETS[preset])  # by now the recipe's, to the others
    cells = STUDIES["tuning"].cells(PRESETS[preset])
    for key, row in ROWS.items():
        as_it_is = row if key == rows.SEARCHED else rows._with(row, common)
        assert said(as_it_is) in [said(c) for c in cells if rows.row_key(c) == key], key


def test_trials_are_shorter_and_never_see_the_validation_set():
    base, rows = planned("tuning", "small")
    recipe = load_recipe("imagenette")
    assert STUDIES["tuning"].seeds(PRESETS["small"]) == 1
    assert len(rows) == 72
    for configs in rows.values():
        for config in configs:
            assert config.data.holdout == 0.2
            assert config.train.epochs == recipe.train.epochs // 2 == base.train.epochs
            assert config.train.perturbation == 1
    shorter = make_plan(STUDIES["tuning"], PRESETS["demo"], None, overrides=["train.epochs=1"])
    assert shorter.base.train.epochs == 1


@pytest.mark.parametrize("name", ["tuning", "ablation", "comparison"])
def test_every_row_can_be_built(name):
    for configs in planned(name).rows.values():
        build_model(configs[0])


def trial(fields: dict, levels: list[float], method: str = "rope", name: str = "") -> dict:
    """At 8 px worse than at 16 by its level, so that the two would choose differently."""
    top1 = {s: {"8": 2 * level - 60, "16": 60.0 - s} for s, level in enumerate(levels)}
    return cell_of(top1, method, name=name, fields=fields)


def searched() -> dict:
    patch = {"name": "vanilla RoPE, patch units"}
    own = {"model.position_units": "patch"}
    return results_of(
        [
            trial({"optim.lr": 1e-3}, [40, 41], "ape"),
            trial({"optim.lr": 2e-3}, [45, 43], "ape"),
            trial({"optim.lr": 5e-4}, [44, 43.5], "ape"),
            trial({**own, "model.base": 10}, [50, 50], **patch),
            trial({**own, "model.base": 100}, [50, 50], **patch),
            trial({**own, "model.base": 10000}, [80], **patch),  # its other seed is missing
        ]
    )


def test_a_row_with_all_that_can_be_added_is_searched_like_the_others(monkeypatch):
    found = {"model.locality_bias": 8.0, "model.base": 10.0}
    tuned = {"imagenette": {"vanilla RoPE, values and near": found}}
    monkeypatch.setattr(rows, "packaged", {"fair/tuned.yaml": tuned}.__getitem__)
    cells = {c.name: dict(c.fields) for c in STUDIES["comparison"].cells(PRESETS["small"])}
    assert cells["vanilla RoPE, values and near"] == {"model.rotate_values": True, **found}
    unsearched = cells["comrope-torus, values and near"]
    assert unsearched["model.locality_bias"] == 4.0
    bases = {fields["model.base"] for name, fields in cells.items() if "near" in name}
    assert bases == {10.0, 100.0}  # those that were not searched have one and the same


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_what_rows_have_is_what_the_trials_that_are_kept_have_found(preset):
    results = ROOT / "results"
    found = gathered(Asked("tuning", preset), results / "runs", "")
    kept = {key: fields for key, fields in
            rows.packaged("fair/tuned.yaml")[PRESETS[preset].recipe].items() if fields}  # fmt: skip
    assert kept
    assert tuning.best(found) == kept


@pytest.fixture
def three_trials(monkeypatch):
    """As many as there are of every row below."""
    monkeypatch.setattr(tuning, "packaged", lambda _: dict.fromkeys(ROWS, range(3)))


@pytest.mark.usefixtures("three_trials")
def test_the_best_is_the_best_mean_over_resolutions_and_seeds():
    assert tuning.best(searched()) == {
        "every row": {"optim.lr": 2e-3},  # what was searched with APE
        "vanilla RoPE, patch units": {"model.base": 10},  # the first of two that are equal
    }


def test_a_row_without_all_its_trials_has_no_best(monkeypatch):
    wanted = {**dict.fromkeys(ROWS, range(3)), "vanilla RoPE, patch units": range(4)}
    monkeypatch.setattr(tuning, "packaged", lambda _: wanted)
    assert tuning.best(searched()) == {"every row": {"optim.lr": 2e-3}}


@pytest.mark.usefixtures("three_trials")
def test_the_best_by_the_training_resolution_alone_is_not_chosen():
    results = results_of(
        [
            cell_of({0: {"8": 10.0, "16": 79.0}}, fields={"optim.lr": 0.5}),
            cell_of({0: {"8": 10.0, "16": 80.0}}, fields={"optim.lr": 1.0}),
            cell_of({0: {"8": 40.0, "16": 70.0}}, fields={"optim.lr": 2.0}),
        ]
    )
    assert tuning.best(results) == {"every row": {"optim.lr": 2.0}}


def test_what_was_found_with_ape_holds_for_every_row_and_for_the_trials_of_the_others(monkeypatch):
    files = {
        "fair/tuned.yaml": {
            "imagenette": {"every row": {"optim.lr": 0.5}, "liere": {"model.base": 7}}
        },
        "fair/search.yaml": {key: [{"optim.angle_lr_scale": 4}] for key in (*ROWS, *FULL)},
    }
    files["fair/search.yaml"]["ape"] = [{"optim.lr": 0.1}]
    monkeypatch.setattr(rows, "packaged", files.__getitem__)
    for cell in STUDIES["comparison"].cells(PRESETS["small"]):
        assert dict(cell.fields)["optim.lr"] == 0.5
        if "model.locality_bias" not in dict(cell.fields):
            assert dict(cell.fields).get("model.base") == (7 if cell.method == "liere" else None)
    for cell in STUDIES["tuning"].cells(PRESETS["small"]):
        assert dict(cell.fields)["optim.lr"] == (0.1 if cell.method == "ape" else 0.5)


@pytest.mark.usefixtures("three_trials")
def test_the_table_of_trials_marks_the_best_and_ends_as_the_file_wants_it(tmp_path):
    results = searched()
    text = tuning.table(results)
    assert "on 0.2 of the training images" in text
    assert "after 20 epochs" in text
    assert "| APE | `optim.lr=0.002` | 2 | 59.5 ± 0.7 | **43.8 ± 1.8** |" in text
    assert "| APE | `optim.lr=0.0005` | 2 | 59.5 ± 0.7 | 43.5 ± 0.7 |" in text
    assert "| vanilla RoPE, patch units | `model.base=10` | 2 |" in text
    block = text.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(block) == {"imagenette": tuning.best(results)}
    save(tuning.figure(results), tmp_path / "figure.png")


def test_an_ablation_changes_one_thing_at_a_time_and_says_which():
    recipe = load_recipe("imagenette")
    assert make_plan(STUDIES["ablation"], PRESETS["small"], None).base.data.holdout == 0.2
    cells = STUDIES["ablation"].cells(PRESETS["small"])
    for method in ("comrope-ld", "comrope-torus"):
        plain, *changed = [cell for cell in cells if cell.method == method]
        own = decisive(plain.config(recipe, 0))
        found = {}
        for cell in changed:
            other = decisive(cell.config(recipe, 0))
            what = cell.name.partition(", ")[2]
            found[what] = {n: other[n] for n in own if own[n] != other[n]}
        turned = {"model.init": "rope-random-axes", "model.base": 10.0}
        rope = {"model.init": "rope", "model.base": 100.0}
        basis = {
            "basis learns at a tenth of the rate": {"optim.basis_lr_scale": 0.1},
            "basis fixed": {"optim.basis_lr_scale": 0.0},
        }
        assert found == (basis if method == "comrope-torus" else {}) | {
            "class token unrotated": {"model.class_position": "unrotated"},
            "starts scattered, base 10": turned | {"model.init": "isotropic"},
            "angles decay": {"optim.angle_weight_decay": 0.05},
            "values too": {"model.rotate_values": True},
            "heads start near": {"model.locality_bias": 4.0},
            "coordinates rescaled, up to twofold": {"train.rescale": 2.0},
            "absolute positions besides": {"model.ape": True},
            "starts as RoPE in patch units, base 100": rope,
            "starts as RoPE in relative units, base 100": rope
            | {"model.position_units": "relative"},
            "starts as RoPE with turned axes, base 10": turned,
            "noise shared by the batch": {"train.perturbation_per": "batch"},
            "no noise": {"train.perturbation": 0.0},
            "angles learn at a tenth of the rate": {"optim.angle_lr_scale": 0.1},
            "angles learn at ten times the rate": {"optim.angle_lr_scale": 10.0},
        }


def test_an_ablation_stands_on_what_was_found_and_drops_what_is_no_change(monkeypatch):
    fields = {"model.init": "rope", "model.base": 100.0, "optim.angle_lr_scale": 4}
    tuned = {"imagenette": {"comrope-ld": fields}}
    monkeypatch.setattr(rows, "packaged", {"fair/tuned.yaml": tuned}.__getitem__)
    recipe = load_recipe("imagenette")
    cells = [c for c in STUDIES["ablation"].cells(PRESETS["small"]) if c.method == "comrope-ld"]
    configs = {cell.name.partition(", ")[2]: cell.config(recipe, 0) for cell in cells}
    assert configs[""].model.init == "rope"
    assert configs["class token unrotated"].optim.angle_lr_scale == 4
    assert configs["angles learn at ten times the rate"].optim.angle_lr_scale == 40
    assert "starts as RoPE in patch units, base 100" not in configs
    random = configs["starts at random"].model
    assert (random.init, random.base) == ("normal", None)


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_an_ablation_draws_noise_the_other_way(preset):
    """Shared by the batch or an image's own: whichever the recipe has not."""
    recipe = load_recipe(PRESETS[preset].recipe)
    cells = STUDIES["ablation"].cells(PRESETS[preset])
    plain = next(cell for cell in cells if cell.method == "comrope-torus" and not cell.name)
    ways = {plain.config(recipe, 0).train.perturbation_per}
    changed = [cell for cell in cells if cell.method == plain.method and "noise" in cell.name]
    changed = [cell.config(recipe, 0).train for cell in changed if cell.perturbation]
    assert len(changed) == 1
    assert ways | {changed[0].perturbation_per} == {"batch", "sample"}


def test_the_table_of_an_ablation_compares_with_the_method_as_it_is(tmp_path):
    results = results_of(
        [
            cell_of({s: {"8": 50.0 + s, "16": 60.0} for s in range(3)}, "comrope-ld"),
            cell_of(
                {s: {"8": 48.0 + s, "16": 60.0} for s in range(3)},
                "comrope-ld",
                name="ComRoPE-LD, no noise",
            ),
            cell_of({0: {"8": 1.0, "16": 2.0}}, "comrope-torus", name="comrope-torus, no noise"),
        ]
    )
    text = ablation.table(results)
    assert "| ComRoPE-LD | 60.0 ± 0.0 | – | – | 55.5 ± 0.5 | – | – |" in text
    assert (
        "| ComRoPE-LD, no noise | 60.0 ± 0.0 | +0.00 [+0.00, +0.00] | undecided | 54.5 ± 0.5 "
        "| -1.00 [-1.00, -1.00] | worse |" in text
    )
    assert "| comrope-torus, no noise | 2.0 | – | – | 1.5 | – | – |" in text
    save(ablation.figure(results), tmp_path / "figure.png")
