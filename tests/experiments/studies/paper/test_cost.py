"""Tab. 5 and 7: parameters against the paper's formulas, and steps that are timed."""

from __future__ import annotations

import json

import pytest
from support.studies import table_lines

from comrope.experiments.common.errors import UserError
from comrope.experiments.studies import STUDIES
from comrope.experiments.studies.paper import cost
from comrope.experiments.studies.reproduce import reproduce

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ["model.name=vit_nano_patch4_12", "train.batch_size=2"]


def test_parameters_are_those_of_the_papers_formulas():
    counted = {(row["method"], row["block_size"]): row for row in cost.count_parameters()}
    for row in counted.values():  # Tab. 5, ViT-B/16: n = 196, d = 768, L = 12, N = 2
        if row["expected"] is not None:
            assert row["parameters"] == row["expected"], row
    assert counted["ape", 8]["parameters"] == 196 * 768
    assert counted["liere", 8]["parameters"] == 12 * 2 * 768 * 8
    assert counted["comrope-ap", 4]["parameters"] == 12 * 768 * 4
    assert counted["comrope-ld", 8]["parameters"] == 12 * (768 * 8 + 768 * 2 // 8)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(cost, "ROUNDS", 1)
    monkeypatch.setattr(cost, "count_parameters", list)


@pytest.mark.usefixtures("quick")
def test_methods_are_timed_after_a_check(tmp_path):
    reproduce("cost", out=tmp_path, methods=["comrope-ld"], overrides=TINY, progress=False)
    (folder,) = tmp_path.glob("cost-*")
    times = json.loads((folder / "results.json").read_text())["times"]
    assert [(row["method"], row["block_size"]) for row in times] == [
        ("rope", 2), ("comrope-ld", 4), ("comrope-ld", 8)
    ]  # fmt: skip
    assert times[0]["train_ratio"] == times[0]["inference_ratio"] == 1
    assert all(row["error"] < 1e-3 for row in times)
    lines = table_lines((folder / "table.md").read_text())
    assert [line[-1] for line in lines if line[0] == "ComRoPE-LD"] == [
        "1.09",
        "1.09",
    ]  # the paper's
    assert (folder / "figure.png").stat().st_size > 10_000


@pytest.mark.usefixtures("quick")
def test_a_method_without_a_row_is_timed_if_the_command_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "ROWS", (("rope", 2),))
    found = reproduce("cost", out=tmp_path, methods=["rope-mixed"], overrides=TINY, progress=False)
    assert [row["method"] for row in found["times"]] == ["rope", "rope-mixed"]


@pytest.mark.usefixtures("quick")
def test_no_speed_is_reported_if_the_check_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "parity_error", lambda model, images: float("nan"))
    with pytest.raises(RuntimeError, match="no speed is reported"):
        reproduce("cost", out=tmp_path, methods=["rope"], overrides=TINY, progress=False)
    assert not list(tmp_path.iterdir())


def test_it_trains_nothing():
    assert not STUDIES["cost"].trains
    with pytest.raises(UserError, match=r"^preset: "):
        reproduce("cost", preset="large", out=None)
