"""Tab. 6: the elements of the angle matrices of trained models."""

from __future__ import annotations

import pytest
from support.runs import tiny
from support.studies import finish_run, plan_of, table_lines

from comrope.experiments.studies.reproduce import reproduce

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_is_measured_from_the_weights_alone(tmp_path):
    options = {"methods": ("comrope-ap", "liere"), "seeds": 1}
    overrides = [f"model.name={tiny().model.name}", "evaluate.resolutions=12"]
    plan = plan_of("distribution", runs=tmp_path / "runs", overrides=(*overrides,), **options)
    for (config,) in plan.rows.values():
        finish_run(config, tmp_path / "runs", {"12": 50.0}, weights=True)
    results = reproduce(
        "distribution", out=tmp_path, gather=True, overrides=overrides, progress=False, **options
    )
    (folder,) = tmp_path.glob("distribution-*")
    lines = table_lines((folder / "table.md").read_text())
    blocks = {(line[0].split(" (")[0], line[1]): line[3] for line in lines}
    assert blocks["ComRoPE-AP", "4"] == "0.208"  # the paper's
    assert blocks["LieRE", "8"] == "0.195"
    assert len(results["rows"]) == 6
    run = results["rows"][0]["runs"][0]
    assert results["rows"][0]["std"]["values"] == [run["std"]]
    assert len(run["histogram"]["edges"]) == len(run["histogram"]["density"]) + 1
    assert (folder / "figure.png").stat().st_size > 10_000
