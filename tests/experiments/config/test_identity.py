"""What makes two configurations the same run."""

from __future__ import annotations

from comrope.experiments.config import RUNTIME, Config, differences, load_recipe, runtime
from comrope.experiments.studies import Cell, run_name


def test_differences_name_the_fields_that_decide():
    mine = Config()
    theirs = mine.with_overrides({"train.seed": 1, "data.workers": 3, "train.log_every": 1})
    assert differences(mine, theirs) == ["train.seed: 0, there 1"]
    assert differences(mine, mine.with_overrides({"options.size": 3}))


def test_runtime_fields_can_be_given_to_another_configuration():
    config = load_recipe("digits")
    assert set(runtime(config)) == RUNTIME
    assert runtime(Config().with_overrides(runtime(config))) == runtime(config)


def test_a_run_has_one_name_for_one_configuration():
    cell, base = Cell("comrope-ld"), load_recipe("digits")
    name = run_name(cell.config(base, 0))
    assert run_name(cell.config(base.with_overrides(["data.workers=1"]), 0)) == name
    for other in (
        cell.config(base, 1),
        cell.config(base.with_overrides(["optim.lr=1e-4"]), 0),
        cell.config(base.with_overrides(["options.size=4"]), 0),
        Cell("comrope-ld", block_size=4).config(base, 0),
    ):
        assert run_name(other) != name
