"""The search before the comparison: its trials, and the best of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.studies import plan_of, results_of, row_of

from comrope.experiments.common.figures import save
from comrope.experiments.config import decisive, load_recipe
from comrope.experiments.studies import PRESETS, STUDIES
from comrope.experiments.studies.fair import rows, tuning
from comrope.experiments.studies.plan import Request
from comrope.experiments.studies.report import kept_runs
from comrope.experiments.studies.reproduce import existing_results
from comrope.experiments.tasks import task_of

ROOT = Path(__file__).parent.parent.parent.parent.parent
STUDY = STUDIES["tuning"]
ROWS = {rows.row_id(row): row for row in rows.ROWS}
EXTENDED = {row.label: row for row in rows.extended_rows()}


def test_every_row_that_has_something_to_tune_has_as_many_trials():
    trials = rows.packaged("fair/search.yaml")
    assert set(trials) == {*ROWS, *EXTENDED}
    for some in trials.values():
        assert len({tuple(sorted(trial.items())) for trial in some}) == len(some) == 6


@pytest.mark.parametrize("preset", PRESETS)
def test_one_trial_is_the_recipe_unchanged(preset):
    """So a search can find that nothing needs to be changed."""
    recipe = load_recipe(PRESETS[preset].recipe)

    def decided(row) -> dict:
        fields = decisive(row.config(recipe, 0))
        return {**fields, "model.base": fields["model.base"] or 10000}

    common = rows.tuned_for_all(PRESETS[preset])  # in place of the recipe's, for the others
    trials = STUDY.rows(PRESETS[preset])
    for key, row in ROWS.items():
        unchanged = row if key == rows.SEARCHED else row.with_fields(common)
        found = [decided(trial) for trial in trials if rows.row_id(trial) == key]
        assert decided(unchanged) in found, key


def test_trials_are_shorter_and_never_see_the_validation_set():
    base, rows = plan_of("tuning", "small")
    recipe = load_recipe("imagenette")
    assert STUDY.seeds(PRESETS["small"]) == 1
    assert len(rows) == 72
    for configs in rows.values():
        for config in configs:
            assert config.data.holdout == 0.2
            assert config.train.epochs == recipe.train.epochs // 2 == base.train.epochs
            assert config.train.perturbation == 1
    assert plan_of("tuning", overrides=("train.epochs=1",)).base.train.epochs == 1


@pytest.mark.parametrize("name", ["tuning", "comparison"])
def test_every_row_can_be_built(name):
    tiny = ("model.name=vit_nano_patch4_12", "evaluate.resolutions=12")
    for configs in plan_of(name, overrides=tiny).rows.values():
        task_of(configs[0]).build_model()


def trial(fields: dict, levels: list[float], method: str = "rope", label: str = "") -> dict:
    """At 8 px worse than at 16 by its level, so that the two would choose differently."""
    top1 = {s: {"8": 2 * level - 60, "16": 60.0 - s} for s, level in enumerate(levels)}
    return row_of(top1, method, label=label, fields=fields)


def searched() -> dict:
    patch = {"label": "vanilla RoPE, patch units"}
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


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_tuned_settings_are_the_best_of_the_kept_trials(preset):
    request = Request(STUDY, PRESETS[preset])
    found = existing_results(request, kept_runs(ROOT / "results"), "")
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
            row_of({0: {"8": 10.0, "16": 79.0}}, fields={"optim.lr": 0.5}),
            row_of({0: {"8": 10.0, "16": 80.0}}, fields={"optim.lr": 1.0}),
            row_of({0: {"8": 40.0, "16": 70.0}}, fields={"optim.lr": 2.0}),
        ]
    )
    assert tuning.best(results) == {"every row": {"optim.lr": 2.0}}


def test_trials_have_what_was_found_with_ape(monkeypatch):
    files = {
        "fair/tuned.yaml": {"imagenette": {"every row": {"optim.lr": 0.5}}},
        "fair/search.yaml": {key: [{"optim.angle_lr_scale": 4}] for key in (*ROWS, *EXTENDED)},
    }
    files["fair/search.yaml"]["ape"] = [{"optim.lr": 0.1}]
    monkeypatch.setattr(rows, "packaged", files.__getitem__)
    monkeypatch.setattr(tuning, "packaged", files.__getitem__)
    for row in STUDY.rows(PRESETS["small"]):
        assert dict(row.fields)["optim.lr"] == (0.1 if row.method == "ape" else 0.5)


@pytest.mark.usefixtures("three_trials")
def test_the_table_marks_the_best_trials_and_ends_with_the_entries_for_the_file(tmp_path):
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
