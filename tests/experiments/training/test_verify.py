"""Finished runs are checked as a whole, and sealed again after a deliberate change."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from support.toy import curve

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import CONFIG, to_yaml
from comrope.experiments.runs.directory import RESULT, WEIGHTS, write_finished
from comrope.experiments.tasks import task_of
from comrope.experiments.training.verify import reseal_run, verify_run


@pytest.fixture
def run(tmp_path):
    weights = task_of(curve()).build_model().state_dict()
    write_finished(tmp_path, to_yaml(curve()), weights, {"error": {"all": 1.0}})
    return tmp_path


def test_a_run_is_checked_with_and_without_weights(run):
    verify_run(run)
    (run / WEIGHTS).write_bytes(b"")
    with pytest.raises(UserError, match=WEIGHTS):
        verify_run(run)
    (run / WEIGHTS).unlink()
    verify_run(run)
    with pytest.raises(UserError, match=WEIGHTS):
        reseal_run(run)
    (run / RESULT).unlink()
    with pytest.raises(UserError, match=RESULT):
        verify_run(run)


def test_the_result_has_the_headline_of_the_task(run):
    (run / RESULT).write_text('{"top1": {"all": 1.0}}')
    for check in (verify_run, reseal_run):
        with pytest.raises(UserError, match="error: expected"):
            check(run)


def test_a_change_is_sealed_only_if_all_other_checks_pass(run):
    (run / CONFIG).write_text((run / CONFIG).read_text() + "# a note\n")
    with pytest.raises(UserError, match=CONFIG):
        verify_run(run)
    reseal_run(run)
    verify_run(run)
    before = (run / RESULT).read_bytes()
    tensors = task_of(curve()).build_model().state_dict()
    tensors["0.weight"][0, 0] = torch.nan
    save_file(tensors, run / WEIGHTS)
    with pytest.raises(UserError, match=r"0\.weight"):
        reseal_run(run)
    assert (run / RESULT).read_bytes() == before
    assert json.loads(before)["seal"]
