"""What studies measure of trained runs and keep beside them, and the rows of results.json."""

from __future__ import annotations

import json
import shutil

import pytest
from support.runs import tiny
from support.studies import finish_run, finish_runs, plan_of

from comrope.experiments.common.errors import UserError
from comrope.experiments.runs.directory import WEIGHTS
from comrope.experiments.runs.store import JsonlStore, records_in
from comrope.experiments.studies import Row, Study
from comrope.experiments.studies.measure import (
    Finished,
    NoRuns,
    Runs,
    gather_row,
    gather_study,
    measure_run,
)
from comrope.experiments.studies.study import Measurement

CONFIG = tiny(evaluate__resolutions=(12, 24))


class Counter:
    """A measurement that counts how often it is made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, config, folder):
        self.count += 1
        assert (folder / WEIGHTS).is_file()
        return {"count": self.count, "by_rho": {"0": 1.0 * self.count, "4": 2.0 * self.count}}


@pytest.fixture
def counting() -> Measurement:
    return Measurement("counts", Counter(), needs_data=True, key={"rho": [0, 4]},
                       averaged=("count", "by_rho"))  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return finish_run(CONFIG, tmp_path / "runs", {"12": 50.0, "24": 60.0}, weights=True)


def study(measurement: Measurement | None) -> Study:
    return Study(name="toy", title="A toy", table=str, figure=str, measurement=measurement)


def measured(measurement, run, config=CONFIG, **options):
    return measure_run(measurement, found(run, config), **options)


def found(run, config=CONFIG) -> Finished:
    return Finished(config, Runs(run.parent).find(config))


def exists(measurement, run, config=CONFIG, *, measure=False) -> bool:
    try:
        gather_study(study(measurement), {Row("ape"): [config]}, Runs(run.parent), measure=measure)
    except NoRuns:
        return False
    return True


def test_it_is_measured_once_and_kept(counting, run):
    first = measured(counting, run)
    assert first["count"] == 1
    (run / WEIGHTS).unlink()
    assert measured(counting, run) == first
    assert exists(counting, run)
    assert counting.run.count == 1


def test_what_depends_on_other_settings_is_measured_again(counting, run):
    measured(counting, run)
    other = Measurement("counts", counting.run, needs_data=True, key={"rho": [0, 8]})
    assert not exists(other, run)
    assert exists(other, run, measure=True)
    assert json.loads((run / "counts.json").read_text())["about"]["rho"] == [0, 8]
    (run / WEIGHTS).unlink()
    assert not exists(counting, run, measure=True)


def test_a_measurement_with_other_data_is_used_for_gathering_only(counting, run):
    first = measured(counting, run)
    kept = json.loads((run / "counts.json").read_text())
    kept["about"]["root"] = "elsewhere"
    (run / "counts.json").write_text(json.dumps(kept))
    assert measured(counting, run, anywhere=True) == first
    assert measured(counting, run)["count"] == 2
    kept["about"]["crop_pct"] = 0.1
    (run / "counts.json").write_text(json.dumps(kept))
    assert not exists(counting, run)


def test_data_that_are_missing_are_not_measured(counting, run):
    gone = CONFIG.with_overrides({"data.root": "/nowhere"})
    assert not exists(counting, run, gone, measure=True)
    without_data = Measurement("counts", counting.run)
    assert exists(without_data, run, gone, measure=True)


def test_a_file_of_another_form_is_measured_again(counting, run):
    (run / "counts.json").write_text(json.dumps({"about": {"rho": [0]}, "top1": {"0": 61.0}}))
    assert not exists(counting, run)
    assert measured(counting, run)["count"] == 1


@pytest.mark.parametrize("found", [{}, {"count": 1}, {"count": "1", "by_rho": {}}])
def test_a_measurement_without_its_figures_is_made_again(found, counting, run):
    about = counting.key_of(CONFIG)
    (run / "counts.json").write_text(json.dumps({"about": about, "found": found}))
    assert not exists(counting, run)
    assert measured(counting, run)["by_rho"] == {"0": 1.0, "4": 2.0}


def test_what_is_averaged_has_mean_and_deviation_over_seeds(counting, tmp_path):
    runs = []
    for seed in range(2):
        config = CONFIG.with_overrides({"train.seed": seed})
        folder = finish_run(config, tmp_path, {"12": 50.0 + seed, "24": 60.0}, weights=True)
        runs.append(found(folder, config))
    row = gather_row(study(counting), Row("ape"), runs)
    assert row["top1"]["12"]["values"] == [50.0, 51.0]
    assert row["count"]["mean"] == 1.5
    assert row["by_rho"]["4"]["values"] == [2.0, 4.0]
    assert row["runs"][1]["by_rho"] == {"0": 2.0, "4": 4.0}


def test_a_study_collects_more_of_the_log_of_a_run(run):
    (run / "log.jsonl").write_text('{"event": "evaluation", "epoch": 1}\n')

    def epochs(record, config):
        return {"epochs": [each["epoch"] for each in record.evaluations]}

    one = Study(name="toy", title="", table=str, figure=str, collect=epochs)
    row = gather_row(one, Row("ape"), [found(run)])
    assert row["runs"][0]["epochs"] == [1]


def test_a_run_that_lacks_a_resolution_is_not_finished(run):
    assert Runs(run.parent).find(CONFIG) is not None
    assert Runs(run.parent).find(tiny(evaluate__resolutions=(12, 36))) is None


def test_missing_rows_are_named_with_the_settings_that_distinguish_them(tmp_path):
    folders = finish_runs(tmp_path, "tuning", lambda *_: 50.0, seeds=1)
    gone = {"ape": 1, "liere": 6, "comrope-ld": 1}
    for row, (folder,) in reversed(folders.items()):
        if gone.get(row.method, 0) and not row.label:
            gone[row.method] -= 1
            shutil.rmtree(folder)
    plan = plan_of("tuning", "small", tmp_path / "runs", data="there")
    ape, liere, ld = gather_study(study(None), plan.rows, Runs(tmp_path / "runs"))["missing"]
    assert ape == "APE (optim.lr=0.002, optim.weight_decay=0.01)"
    assert liere == "LieRE (6 rows)"
    assert ld.startswith("ComRoPE-LD (model.init=")


def test_kept_runs_of_a_store_have_results_and_measurements_but_no_weights(counting, run, tmp_path):
    measured(counting, run)
    (run / WEIGHTS).unlink()
    store = JsonlStore(tmp_path / "store")
    store.add(records_in(run.parent))
    runs = Runs(tmp_path / "none", JsonlStore(tmp_path / "store"))
    rows = {Row("ape"): [CONFIG]}
    assert gather_study(study(counting), rows, runs)["rows"][0]["count"]["values"] == [1]
    other = Measurement("other", counting.run)
    with pytest.raises(NoRuns):
        gather_study(study(other), rows, runs, measure=True)
    with pytest.raises(UserError, match="weights are not kept"):
        measure_run(other, Finished(CONFIG, runs.find(CONFIG)))
