"""Configurations of earlier versions: read silently from files, warned about when typed."""

from __future__ import annotations

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, load_recipe, to_yaml
from comrope.experiments.config.upgrades import SCHEMA, upgrade

OF_SCHEMA_1 = """
model: {position: liere, near: 4.0, rope_units: relative, init: turned}
train: {epochs: 3}
"""


def test_a_file_of_schema_1_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(OF_SCHEMA_1)
    model = load_recipe(path).model
    assert (model.locality_bias, model.position_units) == (4.0, "relative")
    assert model.init == "rope-random-axes"
    path.write_text(to_yaml(load_recipe(path)))
    assert f"schema: {SCHEMA}\n" in path.read_text()
    assert load_recipe(path).model == model


def test_a_file_may_be_based_on_one_of_schema_1(tmp_path):
    (tmp_path / "old.yaml").write_text(OF_SCHEMA_1)
    (tmp_path / "new.yaml").write_text("base: old.yaml\nmodel: {locality_bias: 2.0}\n")
    model = load_recipe(tmp_path / "new.yaml").model
    assert (model.locality_bias, model.position_units) == (2.0, "relative")


def test_files_of_a_later_schema_are_refused(tmp_path):
    (tmp_path / "config.yaml").write_text(f"schema: {SCHEMA + 1}\n")
    with pytest.raises(UserError, match="schema"):
        load_recipe(tmp_path / "config.yaml")


def test_earlier_names_are_accepted_as_typed_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"model\.near: .*model\.locality_bias"):
        assert Config().with_overrides(["model.near=4"]).model.locality_bias == 4
    with pytest.warns(DeprecationWarning, match="rope-random-axes"):
        config = Config().with_overrides(["model.init=turned"])
    assert config.model.init == "rope-random-axes"


def test_removed_fields_are_dropped_at_their_default_only(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("schema: 2\ntrain: {rescale: 1.0, epochs: 3}\noptim: {basis_lr_scale: 1.0}\n")
    assert load_recipe(path).train.epochs == 3
    path.write_text("schema: 2\ntrain: {rescale: 2.0}\n")
    with pytest.raises(UserError, match=r"train\.rescale: .*1\.0, got 2"):
        load_recipe(path)
    with pytest.warns(DeprecationWarning, match=r"optim\.angle_weight_decay"):
        Config().with_overrides(["optim.angle_weight_decay=0"])


def test_present_names_are_left_as_they_are():
    fields = {"model.locality_bias": 1.0, "options.near": 3}
    assert upgrade(fields, SCHEMA) == upgrade(fields, 1) == (fields, [])
