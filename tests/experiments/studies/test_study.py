"""What a study is made of: rows and their configurations, scales, measurements."""

from __future__ import annotations

import pytest
from helpers import raises_for

import comrope
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.studies import STUDIES, find_study
from comrope.experiments.studies.study import (
    METHODS,
    PRESETS,
    Measurement,
    Row,
    Scale,
    Study,
    method_label,
    packaged,
)

DIGITS = load_recipe("digits")


def study(**options) -> Study:
    return Study(name="mine", title="Mine", table=str, figure=str, **options)


def test_a_row_is_a_configuration_of_every_seed():
    row = Row("comrope-ap", perturbation=0.5, block_size=4, fields=(("model.spread", 2.0),))
    config = row.config(DIGITS, seed=3)
    assert (config.model.position, config.model.block_size, config.model.spread) == (
        "comrope-ap", 4, 2.0,
    )  # fmt: skip
    assert (config.train.perturbation, config.train.seed) == (0.5, 3)
    assert config.data == DIGITS.data


def test_epochs_are_rounded_up_and_fields_come_last():
    row = Row("ape", epochs=1.1)
    assert row.config(DIGITS, 0).train.epochs == 14  # of 12
    assert row.with_fields({"train.epochs": 5}).config(DIGITS, 0).train.epochs == 5
    changed = row.with_fields({"train.ema": 0.5}, label="averaged").with_fields({"train.ema": 0.9})
    assert (changed.fields, changed.name) == ((("train.ema", 0.9),), "averaged")


def test_every_method_has_a_label():
    labels = [method_label(method) for method in METHODS]
    assert len(set(labels)) == len(METHODS) == 2 + len(comrope.METHODS)
    assert "(" not in "".join(method_label(method, short=True) for method in METHODS)
    assert Row("comrope-ld").name == method_label("comrope-ld") == "ComRoPE-LD"


def test_a_study_has_scales_of_its_own_or_those_of_the_presets():
    demo, paper = PRESETS["demo"], PRESETS["paper"]
    assert study().scale(demo) == Scale(demo.recipe, demo.data)
    own = study(scales={"demo": Scale("moving", "moving shapes")})
    assert own.scale(demo).recipe == "moving"
    with raises_for("preset", UserError):
        own.scale(paper)
    assert study().trains
    assert not study(run=lambda config: {}).trains


def test_a_measurement_depends_on_the_data_if_it_needs_them():
    there = DIGITS.with_overrides({"data.root": "there", "augment.crop_pct": 0.9})
    plain = Measurement("a", run=lambda config, folder: {}, key={"offsets": [1]})
    assert plain.key_of(there) == plain.key_of(DIGITS) == {"offsets": [1]}
    seen = Measurement("a", run=lambda config, folder: {}, needs_data=True)
    assert seen.key_of(there) == {"root": "there", "crop_pct": 0.9}
    assert seen.key_of(there) != seen.key_of(DIGITS)


def test_every_study_is_found_and_complete():
    for name, found in STUDIES.items():
        assert find_study(name) is found
        assert found.name == name
        assert found.title
        for preset in PRESETS.values():
            if found.scales is None or preset.name in found.scales:
                rows = found.rows(preset)
                assert bool(rows) == found.trains
                assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", ["classify", "no.module:STUDY", "json:dumps"])
def test_other_names_are_refused(name):
    with raises_for("name", UserError):
        find_study(name)


def test_files_of_the_package_are_read():
    assert isinstance(packaged("paper/paper.yaml"), dict)
