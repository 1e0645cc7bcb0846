"""Recipes: loaded, based on each other, composed with a method, written."""

from __future__ import annotations

import pytest
from support.studies import plan_of

from comrope import methods
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import (
    describe_fields,
    load_recipe,
    method_names,
    recipe_names,
    to_yaml,
)
from comrope.experiments.studies.reproduce import paper_figures


def test_every_recipe_loads_with_every_method_and_can_be_written(tmp_path):
    for name in recipe_names():
        config = load_recipe(name)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_recipe(tmp_path / "config.yaml") == config
        for method in method_names():
            assert load_recipe(name, method).model.position == method


def test_the_papers_configuration():
    config = load_recipe("imagenet", "comrope-ld", 1.0)
    assert config.model.name == "vit_base_patch16_224"
    assert (config.train.batch_size, config.train.epochs) == (6144, 200)
    assert (config.optim.lr, config.optim.weight_decay) == (1e-3, 0.01)
    assert (config.optim.schedule, config.optim.warmup_ratio) == ("cosine", 0.02)
    assert config.evaluate.resolutions == (112, 128, 192, 224, 256, 320, 384, 448, 512)


def test_the_papers_fine_tuning():
    plan = plan_of("finetune", "paper")
    config = plan.base
    assert (config.train.epochs, config.train.batch_size, config.optim.lr) == (4, 3456, 3e-4)
    assert config.model.name == config.train.start_from == "timm:vit_base_patch16_clip_224.openai"
    printed = paper_figures()["finetune"]["top1"]
    assert set(printed) <= {row.method for row in plan.rows}
    assert all(row.finetuned for row in plan.rows)  # nothing is pre-trained here


@pytest.mark.parametrize(
    ("short", "arguments"),
    [
        ("imagenet_comrope-ld_p1", ("imagenet", "comrope-ld", 1.0)),
        ("ucf101_liere_p0", ("ucf101", "liere", 0.0)),
        ("digits_rope_p0.25", ("digits", "rope", 0.25)),
        ("coco_liere", ("coco", "liere")),
        ("deit_comrope-ap", ("deit", "comrope-ap")),
        ("imagenet_finetune_ape", ("imagenet_finetune", "ape")),
    ],
)
def test_the_short_name_of_a_recipe_with_a_method(short, arguments):
    assert load_recipe(short) == load_recipe(*arguments)


def test_the_name_of_a_method_may_have_a_digit(monkeypatch):
    monkeypatch.setitem(methods._CLASSES, "rope-2d", "rope_mixed:RoPEMixed")
    for module in ("comrope.methods", "comrope.experiments.config.methods"):
        monkeypatch.setattr(f"{module}.METHODS", (*methods.METHODS, "rope-2d"))
    config = load_recipe("digits_rope-2d_p0.5")
    assert (config.model.position, config.train.perturbation) == ("rope-2d", 0.5)


def test_a_method_keeps_what_a_recipe_says_of_fine_tuning():
    ape, liere = load_recipe("coco", "ape"), load_recipe("coco", "liere")
    assert (ape.model.ape, ape.model.init, ape.train.perturbation) == (False, "normal", 0)
    assert (liere.model.ape, liere.model.init, liere.train.perturbation) == (True, "zeros", 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenete", "'imagenete'; did you mean imagenette"),
        ("imagenet_comrope-dl_p1", "did you mean imagenet_comrope-ld"),
        ("imagenet_finetun", "did you mean imagenet_finetune"),
        ("none.yaml", r"none\.yaml"),
        ("@00", "@00"),
    ],
)
def test_unknown_recipes_are_refused(name, message):
    with pytest.raises(UserError, match=f"recipe: .*{message}"):
        load_recipe(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {epoch: 3}", "train.epoch: .*did you mean epochs"),
        ("trian: {epochs: 3}", "trian: .*did you mean train"),
        ("train: {epochs: 0}", "train.epochs"),
        ("train: 3", "train"),
        ("train: [", "YAML"),
        ("- 1", "sections"),
        ("base: mine.yaml", "based on itself"),
        ("base: imagenette2", "'imagenette2'; did you mean imagenette"),
    ],
)
def test_files_that_are_not_accepted(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(path)


def test_a_file_may_be_based_on_another(tmp_path):
    (tmp_path / "base.yaml").write_text("base: digits_rope_p0\ntrain: {epochs: 3}\n")
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nmodel: {block_size: 4}\n")
    config = load_recipe(tmp_path / "mine.yaml")
    assert (config.model.position, config.train.epochs, config.data.name) == ("rope", 3, "digits")
    assert (config.model.block_size, config.train.perturbation) == (4, 0)


def test_the_description_of_fields():
    text = describe_fields()
    assert "train.precision = 'no'\n" in text
    assert "bf16" in text
    assert "share of the image's. Expects 2 numbers above 0 and up to 1, the first" in " ".join(
        text.split()
    )
    assert "options.NAME" in text
