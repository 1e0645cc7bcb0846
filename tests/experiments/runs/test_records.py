"""What is kept of a finished run: one record, one line of JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from helpers import raises_for
from support.records import OFFSETS, config_of, finish

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, differences, run_id, run_name
from comrope.experiments.runs.records import Record, describe, merge, recipe_of, record_of


def test_the_record_of_a_folder(tmp_path):
    config = config_of(data__root="there")
    folder = finish(tmp_path / "run", config)
    (folder / "offset.json").write_text(json.dumps(OFFSETS))
    record = record_of(folder)
    assert (record.id, record.name) == (run_id(config), run_name(config))
    assert record.config == config
    assert [*record.result["top1"]] == ["12", "8"]  # in their order
    assert record.evaluations == [{"step": 50, "epoch": 5, "top1": 2 / 3}]
    assert record.measured == {"offset": OFFSETS}
    assert record.losses[-1] == [99, 0.0101]
    assert len(record.losses) <= 20
    assert (record.recipe, record.code, record.parent) == ("digits", "0.1.0", None)
    assert Record.from_json(record.to_json()) == record


def test_a_folder_that_is_not_finished_has_no_record(tmp_path):
    assert record_of(finish(tmp_path / "run", config_of(), finished=False)) is None
    assert record_of(tmp_path) is None


@pytest.mark.parametrize("name", ["digits", "scenes", "moving", "imagenette32"])
def test_a_run_belongs_to_the_family_of_its_recipe(name):
    assert recipe_of(config_of(3, name, optim__lr=0.1, model__position="ape")) == name


def test_families_without_a_recipe_are_named_after_their_data():
    assert recipe_of(Config().with_overrides({"data.name": "hfds/me/mine"})) == "hfds-me-mine"
    assert recipe_of(config_of(recipe="imagenette_finetune")) == "imagenette"


def test_records_of_the_first_schema_are_upgraded(tmp_path):
    fields = {"model.near": 4.0, "model.init": "turned"}
    result = {"taken_for": [[1]]}
    record = Record("0" * 12, "name", fields, {"train.keep": 3}, result, schema=1)
    read = Record.from_json(record.to_json())
    assert read.result == {"confusion": [[1]]}
    model = read.config.model
    assert (model.locality_bias, model.init) == (4.0, "rope-random-axes")
    assert differences(record.config, Config())


def test_records_of_one_run_say_what_both_say(tmp_path):
    few = record_of(finish(tmp_path / "few", config_of(), {"12": 50.0}))
    more = replace(
        record_of(finish(tmp_path / "more", config_of(), {"12": 50.0, "8": 40.0})),
        measured={"offset": OFFSETS},
    )
    for one, other in ((few, more), (more, few)):
        merged = merge(replace(one, legacy="old"), other)
        assert merged.result["top1"] == {"12": 50.0, "8": 40.0}
        assert merged.measured == {"offset": OFFSETS}
        assert merged.legacy == "old"
    different = record_of(finish(tmp_path / "other", config_of(), {"12": 51.0}))
    with raises_for(f"run {few.id}", UserError):
        merge(few, different)


def test_a_description_has_everything_but_curves(tmp_path):
    record = record_of(finish(tmp_path / "run", config_of(3)))
    about = yaml.safe_load(describe(replace(record, measured={"offset": OFFSETS})))
    assert about["config"]["train.seed"] == 3
    assert about["measured"] == ["offset"]
    assert not {"loss", "evaluations"} & set(about)


@pytest.mark.parametrize(("line", "named"), [("[]", "names"), ('{"id": "x"}', "schema: ")])
def test_a_line_that_is_no_record(line, named):
    with pytest.raises(ValueError, match=named):
        Record.from_json(line)
