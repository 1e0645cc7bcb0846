"""The folder of a run: who may write into it, and what is read from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import raises_for
from safetensors.torch import save_file

from comrope._files import sha256_of
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import CONFIG, load_recipe, read_config, run_id, to_yaml
from comrope.experiments.runs.directory import (
    RESULT,
    WEIGHTS,
    check_config,
    check_run_dir,
    headline_of,
    read_result,
    read_weights,
    reseal,
    write_config,
    write_finished,
    write_result,
)

DIGITS = load_recipe("digits")
RUN = {"top1": {"12": 1 / 3}}
OF_SCHEMA_1 = "base: digits\nmodel: {near: 4.0, init: turned}\n"


def begun(folder: Path, config=DIGITS) -> Path:
    """The folder of a run with a checkpoint."""
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    write_config(folder, config)
    return folder


def test_a_new_or_empty_folder_is_free(tmp_path):
    check_run_dir(DIGITS, tmp_path / "new")
    check_run_dir(DIGITS, tmp_path)
    (tmp_path / ".1-config.yaml").touch()  # left by a write that was killed
    check_run_dir(DIGITS, tmp_path)


def test_a_run_may_continue_with_other_runtime_fields_only(tmp_path):
    folder = begun(tmp_path / "run")
    check_run_dir(DIGITS.with_overrides({"data.workers": 3}), folder)
    with pytest.raises(UserError, match=r"out: .*train\.epochs: 3, not 12"):
        check_run_dir(DIGITS.with_overrides({"train.epochs": 3}), folder)


def test_a_run_of_the_first_schema_may_continue(tmp_path):
    folder = begun(tmp_path / "run")
    (folder / CONFIG).write_text(OF_SCHEMA_1)
    fields = {"model.locality_bias": 4.0, "model.init": "rope-random-axes"}
    check_run_dir(DIGITS.with_overrides(fields), folder)
    with pytest.raises(UserError, match=r"model\.locality_bias"):
        check_run_dir(DIGITS, folder)


def test_a_run_without_a_checkpoint_may_be_replaced(tmp_path):
    write_config(tmp_path, DIGITS)
    check_run_dir(DIGITS.with_overrides({"train.epochs": 3}), tmp_path)


def test_anything_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").touch()
    for path in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(UserError, match="out: "):
            check_run_dir(DIGITS, path)


def test_what_a_run_starts_from_is_stored_with_it_and_stays(tmp_path):
    parent = begun(tmp_path / "ape", DIGITS.with_overrides({"model.position": "ape"}))
    known = run_id(*read_config(parent))
    child = DIGITS.with_overrides({"train.start_from": str(parent)})
    folder = begun(tmp_path / "child", child)
    assert read_config(folder) == (child, known)
    parent.rename(tmp_path / "elsewhere")
    check_run_dir(child, folder)
    write_config(folder, child)
    assert read_config(folder) == (child, known)
    other = child.with_overrides({"train.start_from": "timm:vit_tiny_patch16_224"})
    with pytest.raises(UserError, match=r"train\.start_from"):
        check_run_dir(other, folder)
    write_config(folder, other)
    assert read_config(folder)[1] == "timm:vit_tiny_patch16_224"


def test_the_result_of_a_run(tmp_path):
    assert read_result(tmp_path) is None
    write_result(tmp_path, {"top1": {"12": 1 / 3}})
    assert read_result(tmp_path) == json.loads((tmp_path / RESULT).read_text())
    (tmp_path / RESULT).write_text("{")
    with pytest.raises(UserError, match=RESULT):
        read_result(tmp_path)


def test_the_weights_of_a_finished_run(tmp_path):
    with pytest.raises(UserError, match=f"run: .*{CONFIG}"):
        read_weights(tmp_path)
    write_config(tmp_path, DIGITS)
    with pytest.raises(UserError, match=f"run: .*{WEIGHTS}"):
        read_weights(tmp_path)
    save_file({"weight": torch.ones(3)}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=f"run: .*{RESULT}"):
        read_weights(tmp_path)
    write_finished(tmp_path, to_yaml(DIGITS), {"weight": torch.ones(3)}, RUN)
    config, tensors = read_weights(tmp_path)
    assert config == DIGITS
    assert tensors["weight"].tolist() == [1, 1, 1]
    (tmp_path / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"start: .*{WEIGHTS}"):
        read_weights(tmp_path, "start")


def test_a_finished_run_is_sealed_and_stays_so(tmp_path):
    text = write_config(tmp_path, DIGITS)
    write_finished(tmp_path, text, {"weight": torch.ones(3)}, RUN)
    assert read_result(tmp_path) == RUN
    seal = check_config(tmp_path)
    assert seal.keys() == {CONFIG, WEIGHTS, "result"}
    assert seal[WEIGHTS] == sha256_of(tmp_path / WEIGHTS)
    more = {**RUN, "top1": {"12": 1 / 3, "24": 50.0}}
    write_result(tmp_path, more)
    assert read_result(tmp_path) == more
    assert {**check_config(tmp_path), "result": ""} == {**seal, "result": ""}
    assert read_weights(tmp_path)[0] == DIGITS


def test_the_configuration_that_was_trained_is_sealed(tmp_path):
    text = write_config(tmp_path, DIGITS)
    for damage in (lambda file: file.write_text("model: {}"), Path.unlink):
        damage(tmp_path / CONFIG)
        write_finished(tmp_path, text, {"weight": torch.ones(3)}, RUN)
        assert read_weights(tmp_path)[0] == DIGITS


def test_a_deliberate_change_is_accepted(tmp_path):
    text = write_config(tmp_path, DIGITS)
    write_finished(tmp_path, text, {"weight": torch.ones(3)}, RUN)
    save_file({"weight": torch.zeros(3)}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=f"start: .*{WEIGHTS}.*results reseal"):
        read_weights(tmp_path, "start")
    reseal(tmp_path)
    assert read_weights(tmp_path)[1]["weight"].tolist() == [0, 0, 0]


def test_a_run_without_a_seal_is_accepted_and_named_once(tmp_path, capfd):
    write_config(tmp_path, DIGITS)
    save_file({"weight": torch.ones(3)}, tmp_path / WEIGHTS)
    write_result(tmp_path, RUN)
    for _ in range(2):
        read_weights(tmp_path)
    said = capfd.readouterr().err
    assert said.count("not sealed") == 1
    assert f"comrope results reseal {tmp_path}" in said
    write_result(tmp_path, RUN)
    assert check_config(tmp_path) is None


def test_weights_that_are_not_finite_do_not_finish_a_run(tmp_path):
    text = write_config(tmp_path, DIGITS)
    with pytest.raises(UserError, match="weight is not finite"):
        write_finished(tmp_path, text, {"weight": torch.tensor([1, torch.nan])}, RUN)
    assert [file.name for file in tmp_path.iterdir()] == [CONFIG]


def test_the_headline_of_a_result():
    assert headline_of(RUN, "top1", "here") == {"12": 1 / 3}
    for wrong in ({}, {"top1": [1]}, {"top1": {"12": "50"}}, {"top1": {"12": torch.nan}}):
        with raises_for("here", UserError, naming="top1"):
            headline_of(wrong, "top1", "here")


def test_results_of_earlier_versions_have_the_present_names(tmp_path):
    write_result(tmp_path, {"top1": {"12": 50.0}, "taken_for": [[1, 0], [0, 1]]})
    assert read_result(tmp_path) == {"top1": {"12": 50.0}, "confusion": [[1, 0], [0, 1]]}
