"""Parts of tables: numbers, differences, seeds and settings in words."""

from __future__ import annotations

from support.studies import results_of, row_of, table_lines

from comrope.experiments.studies import STUDIES
from comrope.experiments.studies.stats import Difference
from comrope.experiments.studies.tables import (
    describe_fields,
    describe_seeds,
    describe_validation,
    format_difference,
    format_mean,
    row_label,
    spread,
    study_table,
)

TABLE = STUDIES["comparison"]


def row(method="ape", seeds=2, **about) -> dict:
    return row_of({s: {"8": 50.0 + s, "16": 60.0} for s in range(seeds)}, method, **about)


def test_means_have_a_deviation_if_there_are_several_seeds():
    assert format_mean(spread([1.0, 3.0])) == "2.00 ± 1.41"
    assert format_mean(spread([1.0]), 1) == "1.0"


def test_differences_have_an_interval_and_a_verdict():
    found = Difference(1.0, 0.5, 1.5, 3)
    assert format_difference(found) == ["+1.00 [+0.50, +1.50]", "better"]
    assert format_difference(found, bold=True)[1] == "**better**"
    assert format_difference(None) == ["–", "–"]
    assert format_difference(Difference(-2.0, None, None, 1)) == ["-2.00", "undecided"]


def test_runs_that_others_start_from_count_for_no_seeds():
    start, own = row(seeds=1), row(seeds=3)
    assert describe_seeds(results_of([start, {**own, "finetuned": True}])) == "3 seeds"
    assert describe_seeds(results_of([start, own])) == "1 to 3 seeds"
    assert describe_seeds(results_of([start])) == "one seed"
    assert describe_seeds({}) == ""


def test_liere_is_marked_where_only_it_shares_the_perturbation():
    shared = row("liere", perturbation_per="batch")
    assert "shared by the batch" in row_label(shared)
    assert "shared" not in row_label(shared, settings=False)
    assert "shared" not in row_label({**shared, "perturbation": 0.0})


def test_the_data_of_validation_are_described():
    assert "0.2 of the training images" in describe_validation(results_of([]))
    assert describe_validation({"recipe": {"data": {}}}) == "on the validation set"


def test_fields_are_written_as_a_command_line_takes_them():
    fields = {"optim.lr": 0.1, "model.axis_scale": [0.0, 1.0]}
    assert describe_fields(fields) == "`optim.lr=0.1`, `model.axis_scale=0,1`"


def test_a_table_names_seeds_settings_missing_rows_and_the_command():
    own = row("rope", label="a row", fields={"optim.lr": 0.1, "model.axis_scale": (1.0,)})
    common = row(fields={"optim.lr": 0.1})
    results = results_of([common, own], missing=["LieRE"], where="Tab. 9")
    text = study_table(TABLE, results)
    assert text.startswith("# A study (Tab. 9 of the paper)\n\nOurs: made up. Mean")
    assert "of 2 seeds" in text
    assert "all rows: `optim.lr=0.1`; a row: `model.axis_scale=1`." in text
    assert "Not run yet: LieRE." in text
    assert text.endswith("`comrope reproduce`, none, torch 0, 2026-01-01\n")
    assert ["APE", "1", "50.5 ± 0.7", "60.0 ± 0.0", "55.2 ± 0.4"] in table_lines(text)
