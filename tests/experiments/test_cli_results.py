"""``comrope results``: runs are stored, listed and shown; a stored run is a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from comrope.experiments.cli import app
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import CONFIG, load_recipe, run_id, to_yaml
from comrope.experiments.runs.directory import RESULT, read_weights

CONFIGS = [load_recipe("digits").with_overrides({"train.seed": seed}) for seed in range(2)]


def results(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["results", *map(str, arguments)], catch_exceptions=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def store(tmp_path):
    for seed, config in enumerate(CONFIGS):
        folder = tmp_path / "out" / "runs" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(to_yaml(config))
        (folder / RESULT).write_text(json.dumps({"top1": {"12": 50.0 + seed}, "confusion": [[1]]}))
    return tmp_path / "store"


def test_finished_runs_are_added_once(store):
    said = results("add", store.parent / "out", "--store", store)
    assert "2 of 2" in said
    assert all(run_id(config) in said for config in CONFIGS)
    said = results("add", store.parent / "out" / "runs" / "seed-1", "--store", store)
    assert "0 of 1" in said
    (result,) = (store.parent / "out").glob("runs/seed-1/result.json")
    result.write_text('{"top1": {"12": 60.0}}')
    with pytest.raises(UserError, match="top1"):
        results("add", store.parent / "out", "--store", store)
    assert "1 of 2" in results("add", store.parent / "out", "--store", store, "--replace")


def test_runs_are_listed_and_shown(store):
    results("add", store.parent / "out", "--store", store)
    lines = results("show", "--store", store).splitlines()
    assert [line.split()[:2] for line in lines] == [[run_id(c), "digits"] for c in CONFIGS]
    shown = yaml.safe_load(results("show", run_id(CONFIGS[1])[:6], "--store", store))
    assert shown["config"]["train.seed"] == 1
    assert shown["result"]["top1"] == {"12": 51.0}


def test_the_configuration_of_a_stored_run_is_a_recipe(store, tmp_path):
    results("add", store.parent / "out", "--store", store)
    path = tmp_path / "mine.yaml"
    path.write_text(results("show", run_id(CONFIGS[1]), "--yaml", "--store", store))
    assert load_recipe(path) == CONFIGS[1]


def test_weights_of_a_stored_run_must_be_trained_first():
    with pytest.raises(UserError, match=r"train\.start_from: @0123456789ab .*comrope train"):
        read_weights(Path("@0123456789ab"), "train.start_from")
