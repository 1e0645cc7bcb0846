"""Recipes: complete, typed, overridable; what is wrong with one is said in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import (
    Config,
    differences,
    load_recipe,
    recipe_names,
    to_dict,
    to_yaml,
)
from comrope.experiments.studies import PRESETS, STUDIES, Cell, run_name
from comrope.experiments.studies.plan import make_plan
from comrope.experiments.studies.reproduce import paper_figures


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_survives_being_written(name, tmp_path):
    config = load_recipe(name)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_recipe(tmp_path / "config.yaml") == config


def test_the_papers_configuration():
    config = load_recipe("imagenet_comrope-ld_p1")
    assert config.model.name == "vit_base_patch16_224"
    assert (config.train.batch_size, config.train.epochs) == (6144, 200)
    assert (config.optim.lr, config.optim.weight_decay) == (1e-3, 0.01)
    assert (config.optim.schedule, config.optim.warmup_ratio) == ("cosine", 0.02)
    assert config.evaluate.resolutions == (112, 128, 192, 224, 256, 320, 384, 448, 512)


def test_a_recipe_for_every_row_is_what_the_study_runs():
    for cell in STUDIES["classification"].cells(PRESETS["paper"]):
        row = load_recipe(f"imagenet_{cell.method}_p{cell.perturbation:g}")
        planned = cell.config(load_recipe(PRESETS["paper"].recipe), 0)
        # Without noise, how it is drawn decides nothing.
        if not cell.perturbation:
            planned = planned.with_overrides({"train.perturbation_per": "sample"})
        assert row == planned


def test_overrides_are_typed():
    config = Config().with_overrides(
        ["optim.lr=1e-4", "train.precision=no", "augment.scale=[0.5,1]", "train.ema=0.99",
         "evaluate.resolutions=224", "model.base=null"]
    )  # fmt: skip
    assert config.optim.lr == 1e-4
    assert config.train.precision == "no"
    assert config.augment.scale == (0.5, 1.0)
    assert config.train.ema == 0.99
    assert config.evaluate.resolutions == (224,)
    assert config.model.base is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "train.epoch: no such field; did you mean train.epochs"),
        ("epochs=3", "epochs: no such field"),
        ("train.epochs=many", "train.epochs: expected int, got 'many'"),
        ("train.epochs=1.5", "train.epochs: expected int, got 1.5"),
        ("train.epochs=true", "train.epochs: expected int, got True"),
        ("train.epochs=0", "train.epochs: expected at least 1, got 0"),
        ("optim.lr=-1", "optim.lr: expected a number of at least 0"),
        ("optim.lr=nan", "optim.lr: expected a number of at least 0"),
        ("train.precision=fp8", "train.precision: expected one of no, bf16, fp16"),
        ("augment.scale=[1]", "augment.scale: expected 2 values"),
        ("train.accumulate=7", "train.accumulate: expected a divisor of train.batch_size 6144"),
        ("train.epochs", "train.epochs: expected a field and its value"),
        ("train.epochs=[1", "train.epochs: expected int, got"),
        ("evaluate.resolutions=[]", "evaluate.resolutions: expected at least one"),
        (
            "model.name=foo",
            "model.name: expected vit_SIZE_patchP_RESOLUTION or timm:NAME, got 'foo'",
        ),
        ("data.in_chans=1", "data.mean: expected data.in_chans 1 values"),
        ("model.class_token=3", "model.class_token: expected bool"),
    ],
)
def test_bad_overrides(override, message):
    with pytest.raises(UserError, match=message):
        Config().with_overrides([override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {epoch: 3}", "train.epoch: no such field; did you mean epochs"),
        ("trian: {epochs: 3}", "trian: no such field; did you mean train"),
        ("train: 3", "train.expected fields, got 3"),
        ("train: [", "not YAML"),
        ("- 1", "expected sections with fields"),
        ("base: mine.yaml", "stands on itself"),
        ("base: imagenette2", "no 'imagenette2'; did you mean imagenette"),
    ],
)
def test_bad_recipe_files(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(path)


def test_unknown_recipes_are_refused():
    with pytest.raises(UserError, match="recipe: no 'imagenete'; did you mean imagenette"):
        load_recipe("imagenete")
    with pytest.raises(UserError, match=r"recipe: no file none\.yaml"):
        load_recipe("none.yaml")


def test_a_file_may_stand_on_another(tmp_path):
    (tmp_path / "base.yaml").write_text("base: digits\ntrain: {epochs: 3}\n")
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nmodel: {position: ape}\n")
    config = load_recipe(tmp_path / "mine.yaml")
    assert (config.model.position, config.train.epochs, config.data.name) == ("ape", 3, "digits")


def test_differences_name_what_decides_and_nothing_else():
    mine = Config()
    theirs = mine.with_overrides({"train.seed": 1, "data.workers": 3, "train.log_every": 1})
    assert differences(mine, theirs) == ["train.seed: 0, there 1"]


def test_a_run_has_one_name_for_one_configuration():
    cell, base = Cell("comrope-ld"), load_recipe("digits")
    name = run_name(cell.config(base, 0))
    assert run_name(cell.config(base.with_overrides(["data.workers=1"]), 0)) == name
    for other in (
        cell.config(base, 1),
        cell.config(base.with_overrides(["optim.lr=1e-4"]), 0),
        Cell("comrope-ld", block_size=4).config(base, 0),
    ):
        assert run_name(other) != name


def test_a_row_keeps_what_is_its_own():
    base = load_recipe("digits").with_overrides(["model.block_size=2", "train.perturbation=0"])
    config = Cell("comrope-ap", perturbation=1.0, block_size=8).config(base, 3)
    assert (config.model.block_size, config.train.perturbation, config.train.seed) == (8, 1, 3)


def test_texts_are_taken_as_they_are_typed():
    for path in ("/data/a #b", "/data/x: y", "[1", "2024", "no"):
        assert Config().with_overrides([f"data.root={path}"]).data.root == path
    assert Config().with_overrides(["data.root=null"]).data.root is None


def test_every_field_is_plain_yaml():
    for section in to_dict(Config()).values():
        for value in section.values() if isinstance(section, dict) else [section]:
            assert value is None or isinstance(value, (bool, int, float, str, list))


def test_a_task_and_its_options():
    config = Config().with_overrides(
        ["task=package.module:Class", "options.rate=1e-3", "options.size=3", "options.on=true"]
    )
    assert config.task == "package.module:Class"
    assert config.options == {"rate": 1e-3, "size": 3, "on": True}
    assert Config().options == {}
    assert len({config, Config(), Config()}) == 2
    assert differences(config, Config())
    assert run_name(config) != run_name(config.with_overrides(["options.size=4"]))
    for wrong in ("options.size=[1]", "options=3", "taks=images"):
        with pytest.raises(UserError, match=wrong.partition("=")[0]):
            config.with_overrides([wrong])


def test_the_papers_fine_tuning():
    plan = make_plan(STUDIES["finetune"], PRESETS["paper"], Path("runs"))
    config = plan.base
    assert (config.train.epochs, config.train.batch_size, config.optim.lr) == (4, 3456, 3e-4)
    assert config.model.name == config.train.start_from == "timm:vit_base_patch16_clip_224.openai"
    printed = paper_figures()["finetune"]["top1"]
    assert set(printed) <= {cell.method for cell in plan.rows}
    assert all(cell.finetuned for cell in plan.rows)  # nothing is pre-trained here
