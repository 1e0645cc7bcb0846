"""What studies find out about a trained model and keep beside its run."""

from __future__ import annotations

import json

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.runs.directory import WEIGHTS
from comrope.experiments.studies.measure import is_at_hand, look_beside
from comrope.experiments.training.train import train
from experiments.runs import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = tiny(train__epochs=1, evaluate__resolutions=(12, 24))


@pytest.fixture
def run(tmp_path):
    train(CONFIG, tmp_path / "run", progress=False)
    return tmp_path / "run"


def without_weights(folder):
    (folder / WEIGHTS).unlink()
    return folder


def test_it_is_measured_once_and_kept(run):
    found = look_beside("units", CONFIG, run, False, False)
    assert list(found["units"]["0"]) == ["12", "24"]
    assert is_at_hand("units", CONFIG, without_weights(run), measure=False)
    assert look_beside("units", CONFIG, run, False, False) == found
    assert look_beside("classification", CONFIG, run, False, False) == {}


def test_other_resolutions_are_measured_anew_or_missing(run):
    look_beside("units", CONFIG, run, False, False)
    other = CONFIG.with_overrides({"evaluate.resolutions": (12, 36)})
    assert not is_at_hand("units", other, run, measure=False)
    assert is_at_hand("units", other, run, measure=True)
    assert list(look_beside("units", other, run, True, False)["units"]["1"]) == ["12", "36"]
    assert not is_at_hand("units", CONFIG, without_weights(run), measure=True)


def test_what_was_found_with_other_data_is_for_gathering_only(run):
    found = look_beside("offset", CONFIG, run, False, False)
    kept = json.loads((run / "offset.json").read_text())
    kept["about"]["root"] = "elsewhere"
    (run / "offset.json").write_text(json.dumps(kept))
    without_weights(run)
    assert look_beside("offset", CONFIG, run, True, False) == found
    with pytest.raises(UserError, match=r"model\.safetensors"):
        look_beside("offset", CONFIG, run, False, False)
    kept["about"]["crop_pct"] = 0.1
    (run / "offset.json").write_text(json.dumps(kept))
    assert not is_at_hand("offset", CONFIG, run, measure=True)


def test_a_file_of_another_form_is_none(run):
    """As it was before units were measured."""
    before = {"about": {"root": None, "crop_pct": 1.0, "rho": [0]}, "top1": {"0": 61.0}}
    (run / "offset.json").write_text(json.dumps(before))
    assert not is_at_hand("offset", CONFIG, run, measure=False)
    assert set(look_beside("offset", CONFIG, run, False, False)) == {"offset"}
