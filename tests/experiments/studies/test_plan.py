"""Plans: which runs a study has at a preset, and what a command may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.studies import plan_of

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.studies import PRESETS, STUDIES, Row, run_name
from comrope.experiments.studies.plan import Request, find_preset
from comrope.experiments.tasks import task_of

TRAINED = [name for name, study in STUDIES.items() if study.trains]


@pytest.mark.parametrize("name", TRAINED)
def test_every_study_has_rows_at_every_preset_that_it_has(name):
    for preset in STUDIES[name].scales or PRESETS:
        plan = plan_of(name, preset, gather=True)
        assert plan.rows
        assert all(plan.rows.values())


@pytest.mark.parametrize("name", TRAINED)
def test_a_preset_without_a_recipe_is_refused_with_those_there_are(name):
    scales = STUDIES[name].scales or PRESETS
    for preset in PRESETS.keys() - scales:
        with pytest.raises(UserError) as caught:
            plan_of(name, preset)
        *some, last = scales
        choices = f"{', '.join(some)} or {last}"
        assert str(caught.value) == f"preset: {name} has no preset {preset!r}; choose {choices}"


def test_unknown_presets_and_methods_get_a_suggestion():
    with pytest.raises(UserError, match=r"^preset: .*did you mean tiny"):
        find_preset("tinny")
    with pytest.raises(UserError, match=r"^methods: .*did you mean comrope-ld"):
        plan_of("classification", methods=("comrope_ld",))
    with pytest.raises(UserError, match=r"^methods: expected some of ape, .*got 'rope'"):
        plan_of("detection", methods=("ape", "rope"))
    with pytest.raises(UserError, match=r"^methods: "):
        plan_of("cost", methods=("rotary",))


def test_a_method_that_is_not_in_the_preset_has_a_row_if_the_command_names_it():
    assert "rope-mixed" not in PRESETS["demo"].methods
    for study, count in {"classification": 1, "offset": 1, "finetune": 2, "video": 1}.items():
        rows = plan_of(study, methods=("rope-mixed",)).rows
        assert [row.method for row in rows][-1] == "rope-mixed"
        assert len(rows) == count  # fine-tuning has the run before
    with pytest.raises(UserError, match=r"^methods: .*got 'rope-mixed'"):
        plan_of("perturbation", methods=("rope-mixed",))


@pytest.mark.parametrize(
    ("study", "override"),
    [
        ("classification", "model.position=ape"),
        ("comparison", "model.position_units=patch"),
        ("finetune", "model.init=rope"),
        ("finetune", "pretrain.model.position=rope"),
    ],
)
def test_a_command_cannot_set_what_the_rows_set(study, override):
    name = override.removeprefix("pretrain.").partition("=")[0]
    with pytest.raises(UserError, match=f"^{name}: "):
        plan_of(study, overrides=(override,))


def test_fields_of_the_runs_that_others_start_from_need_such_runs():
    with pytest.raises(UserError, match=r"^pretrain\.train\.epochs: "):
        plan_of("offset", overrides=("pretrain.train.epochs=1",))


def test_a_study_is_for_its_kind_of_data():
    with pytest.raises(UserError, match=r"^data\.name: "):
        plan_of("cost", overrides=("data.name=moving", "data.frames=4"))


def test_seeds_are_those_of_the_command_of_the_row_or_of_the_study():
    rows = plan_of("comparison", "small").rows
    assert {row.perturbation: len(configs) for row, configs in rows.items()} == {1.0: 5, 0.0: 3}
    rows = plan_of("comparison", "small", seeds=4).rows
    assert {len(configs) for configs in rows.values()} == {4}
    assert {len(configs) for configs in plan_of("video").rows.values()} == {1}


def test_the_fields_of_a_row_come_last():
    fields = (("train.perturbation_per", "sample"), ("optim.lr", 0.5))
    config = Row("liere", fields=fields).config(load_recipe("imagenette"), 3)
    assert (config.train.perturbation_per, config.optim.lr, config.train.seed) == ("sample", 0.5, 3)


def test_all_detectors_start_from_one_backbone():
    plan = plan_of("detection", "small", overrides=("pretrain.data.root=x",))
    (backbone,), *rows = plan.rows.values()
    assert {len(row) for row in rows} == {3}
    starts = {config.train.start_from for row in rows for config in row}
    assert starts == {str(Path("runs") / run_name(backbone))}


def test_the_data_of_the_backbone_must_be_given():
    with pytest.raises(UserError, match=r"^pretrain\.data\.root: "):
        plan_of("detection", "small", data="there")
    own = ("pretrain.data.root=elsewhere", "data.workers=1", "train.device=cpu")
    base, rows = plan_of("detection", "small", data="there", overrides=own)
    before = rows[STUDIES["detection"].start.row][0]
    assert (before.data.root, before.data.name, before.data.workers) == ("elsewhere", "folder", 8)
    assert (before.model.name, before.train.device) == (base.model.name, "cpu")
    assert {c.data.root for row in rows if row.finetuned for c in rows[row]} == {"there"}
    paper = replace(PRESETS["paper"], seeds=1)
    plan = Request(STUDIES["detection"], paper, data="there").plan(Path("runs"))
    assert STUDIES["detection"].start.row not in plan.rows  # it starts from weights of timm


@pytest.mark.parametrize(
    "name", ["classification", "offset", "block-size", "perturbation", "comparison", "values"]
)
def test_all_models_of_the_scale_that_cpus_train_can_be_built(name):
    for configs in plan_of(name, "tiny").rows.values():
        task_of(configs[0]).build_model()
