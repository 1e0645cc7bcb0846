"""Files of finished runs that have changed: every command refuses them in one line."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers import raises_for
from safetensors.torch import save_file
from support.faults import (
    called,
    change_weights,
    copy_of,
    flip_bit,
    pickled,
    raises_line,
    refused,
    unseal,
)
from support.runs import finetuned, same, trainer_of, weights

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import CONFIG, load_recipe, to_yaml
from comrope.experiments.inspect import at_the_start
from comrope.experiments.runs.directory import RESULT, WEIGHTS, write_finished
from comrope.experiments.runs.records import record_of
from comrope.experiments.tasks import task_of
from comrope.experiments.training.evaluate import load_run
from comrope.experiments.training.train import train
from comrope.experiments.training.verify import reseal_run, verify_run

HEAD, NORM = "head.weight", "norm.weight"


@pytest.fixture
def other(digits, tmp_path) -> Path:
    """Another finished run of the same shapes."""
    config, folder = digits.with_overrides({"train.seed": 1}), tmp_path / "other"
    weights = task_of(config).build_model().state_dict()
    write_finished(folder, to_yaml(config), weights, {"top1": {"12": 9.0}})
    return folder


def sparse(path: Path) -> None:
    """A file of a terabyte, without content."""
    with path.open("wb") as file:
        file.truncate(2**40)


# Weights


def test_a_run_that_did_not_change_is_read(run):
    verify_run(run)
    assert same(load_run(run)[1].state_dict(), weights(run))


def test_of_12_flipped_bits_12_are_refused(run):
    whole = (run / WEIGHTS).read_bytes()
    for seed in range(12):
        flip_bit(run / WEIGHTS, seed)
        with raises_line(run / WEIGHTS):
            load_run(run)
        (run / WEIGHTS).write_bytes(whole)
    load_run(run)


def put(name: str, place: tuple[int, ...], value: float):
    def change(tensors):
        tensors[name][place] = value

    return change


def cast(name: str, dtype: torch.dtype):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def swap_two(tensors) -> None:
    first, second = "blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


# Changes of weights, and the tensor that a run without a seal names; None: only a seal shows it.
CHANGED = {
    "one value is NaN": (put(HEAD, (0, 0), torch.nan), HEAD),
    "one value is infinite": (put(NORM, (3,), torch.inf), NORM),
    "one value is minus infinity": (put(HEAD, (9, 5), -torch.inf), HEAD),
    "a row is infinite": (put(HEAD, (2,), torch.inf), HEAD),
    "int64": (cast(HEAD, torch.int64), HEAD),
    "bool": (cast(HEAD, torch.bool), HEAD),
    "float16": (cast(NORM, torch.float16), NORM),
    "float64": (cast(NORM, torch.float64), NORM),
    "float8": (cast(NORM, torch.float8_e4m3fn), NORM),
    "complex": (cast(NORM, torch.complex64), NORM),
    "all bfloat16": (
        lambda tensors: [cast(name, torch.bfloat16)(tensors) for name in list(tensors)],
        "bfloat16",
    ),
    "another shape": (lambda t: t.update({HEAD: torch.zeros(3, 64)}), HEAD),
    "transposed": (lambda t: t.update({HEAD: t[HEAD].mT}), HEAD),
    "one more axis": (lambda t: t.update({NORM: t[NORM][None]}), NORM),
    "empty": (lambda t: t.update({NORM: torch.zeros(0)}), NORM),
    "missing": (lambda t: t.pop(NORM), NORM),
    "additional": (lambda t: t.update(extra=torch.zeros(1)), "extra"),
    "renamed": (lambda t: t.update(norm2=t.pop(NORM)), NORM),
    "none": (lambda t: t.clear(), "missing"),
    "two of a shape exchanged": (swap_two, None),
    "one value": (put(HEAD, (0, 0), 1.0), None),
    "smallest change": (lambda t: t[NORM][0].copy_(t[NORM][0].nextafter(torch.tensor(9.0))), None),
    "negative zero": (lambda t: t["head.bias"].zero_().neg_(), None),
}


@pytest.mark.parametrize("how", CHANGED)
def test_changed_weights_are_refused(how, run):
    change, named = CHANGED[how]
    change_weights(run / WEIGHTS, change)
    with raises_line(run / WEIGHTS):
        load_run(run)
    if named is not None:  # neither as a run of an earlier version, nor if someone asks for it
        unseal(run)
        for read in (load_run, reseal_run):
            with raises_line(run / WEIGHTS, named):
                read(run)


FILES = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "the header only": lambda content: content[:100],
    "a half": lambda content: content[: len(content) // 2],
    "without the last byte": lambda content: content[:-1],
    "with one byte more": lambda content: content + b"\0",
    "zeros": lambda content: bytes(len(content)),
    "a header of 1 TB": lambda content: (2**40).to_bytes(8, "little") + content[8:],
    "a header of 2^64-1 bytes": lambda content: b"\xff" * 8 + content[8:],
    "another name in the header": lambda content: content.replace(b"norm.bias", b"norm.bios"),
    "another dtype in the header": lambda content: content.replace(b'"F32"', b'"I32"', 1),
    "an unknown dtype": lambda content: content.replace(b'"F32"', b'"X32"', 1),
    "text": lambda content: b"not weights",
}


@pytest.mark.parametrize("how", FILES)
def test_damaged_files_of_weights_are_refused(how, run):
    file = run / WEIGHTS
    file.write_bytes(FILES[how](file.read_bytes()))
    for seal in (True, False):
        if not seal:
            unseal(run)
        with raises_line(file):
            load_run(run)


def test_a_pickle_in_place_of_weights_is_not_opened(run, tmp_path):
    (run / WEIGHTS).write_bytes(pickled(tmp_path / "marker"))
    refused(run / WEIGHTS, "eval", run, "--quiet")
    unseal(run)
    refused(run / WEIGHTS, "eval", run, "--quiet")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, RESULT])
def test_a_file_of_another_run_is_refused(name, run, other):
    verify_run(other)
    shutil.copy(other / name, run / name)
    with raises_line(run):
        verify_run(run)


def test_weights_that_are_a_folder_or_gone_are_not_a_finished_run(run):
    (run / WEIGHTS).unlink()
    (run / WEIGHTS).mkdir()
    with raises_line(run, WEIGHTS):
        load_run(run)
    (run / WEIGHTS).rmdir()
    with raises_line(run, WEIGHTS):
        load_run(run)
    verify_run(run)  # results are used without weights


def test_weights_without_a_result_are_not_a_finished_run(run):
    (run / RESULT).unlink()
    with raises_line(run, RESULT):
        load_run(run)


# Commands


def test_every_command_that_reads_a_run_refuses_it(run, tmp_path):
    flip_bit(run / WEIGHTS, 5)
    reseal = f"comrope results reseal {run}"
    for command in (
        ("eval", run, "--resolutions", 12, "--quiet"),
        ("inspect", run, "--out", tmp_path / "inspect"),
        ("export", run, "--to", "safetensors", "--out", tmp_path / "model"),
        ("results", "add", run, "--store", tmp_path / "store"),
        ("train", "digits_finetune", f"train.start_from={run}", "--out", tmp_path / "new"),
    ):
        assert reseal in refused(WEIGHTS, *command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]


def test_more_views_of_a_changed_run_are_refused(digits, run):
    flip_bit(run / WEIGHTS, 1)
    before = (run / RESULT).read_bytes()
    with raises_line(run / WEIGHTS):
        train(digits.with_overrides({"evaluate.resolutions": (12, 24)}), run, progress=False)
    assert (run / RESULT).read_bytes() == before


def test_more_views_keep_the_seal(digits, run):
    before = json.loads((run / RESULT).read_text())
    more = digits.with_overrides({"evaluate.resolutions": (12, 24)})
    train(more, run, progress=False)
    after = json.loads((run / RESULT).read_text())
    assert set(after["top1"]) == {"12", "24"}
    assert after["seal"]["result"] != before["seal"]["result"]
    assert {**after["seal"], "result": ""} == {**before["seal"], "result": ""}
    verify_run(run)


def test_a_deliberate_change_is_accepted_and_evaluated(run):
    change_weights(run / WEIGHTS, put(HEAD, (0, 0), 1.0))
    code, said = called("results", "reseal", run)
    assert (code, said) == (0, f"sealed: {run}\n")
    assert load_run(run)[1].head.weight[0, 0] == 1


def test_all_runs_of_a_folder_are_sealed_again(run, other, tmp_path):
    study = tmp_path / "study" / "runs"
    study.mkdir(parents=True)
    for folder in (run, other):
        target = copy_of(folder, study / folder.name)
        (target / CONFIG).write_text((target / CONFIG).read_text() + "# a note\n")
    assert called("results", "reseal", study.parent)[0] == 0
    for folder in study.iterdir():
        verify_run(folder)
    refused("folder", "results", "reseal", tmp_path / "none")


def test_a_run_of_an_earlier_version_is_accepted_and_can_be_sealed(run, capfd):
    unseal(run)
    code, said = called("eval", run, "--resolutions", 12, "--quiet")
    assert code == 0
    assert said.count("\n") == 2
    assert "not sealed" in said
    assert f"comrope results reseal {run}" in said
    assert called("results", "reseal", run)[0] == 0
    flip_bit(run / WEIGHTS, 3)
    refused(WEIGHTS, "eval", run, "--quiet")


def test_stored_records_have_no_seal(run, tmp_path):
    assert called("results", "add", run, "--store", tmp_path / "store")[0] == 0
    assert '"seal"' not in (tmp_path / "store" / "digits.jsonl").read_text()
    sealed = record_of(run)
    unseal(run)
    assert record_of(run) == sealed


# Initial weights


def test_initial_weights_that_are_not_finite_are_the_reason(run, tmp_path):
    unseal(run)
    change_weights(run / WEIGHTS, put(NORM, (0,), torch.nan))
    with raises_for("train.start_from", UserError, naming="finite"):
        trainer_of(finetuned(run)).initialize()


def test_a_file_of_initial_weights_that_are_not_finite_is_the_reason(tmp_path):
    pytest.importorskip("pycocotools")
    file = tmp_path / "start.safetensors"
    save_file({"norm.weight": torch.tensor([1.0, torch.inf])}, file)
    config = load_recipe("scenes").with_overrides({"train.start_from": str(file)})
    task = task_of(config)
    with raises_for(
        "train.start_from", UserError, naming="norm.weight has values that are not finite"
    ):
        task.initialize(task.build_model())


def test_inspect_does_not_replace_a_damaged_start_by_random_weights(run, digits):
    config = digits.with_overrides({"train.start_from": str(run)})
    at_the_start(config)
    flip_bit(run / WEIGHTS, 0)
    with raises_line(run / WEIGHTS):
        at_the_start(config)


# Configuration


@pytest.mark.parametrize("damage", [os.mkfifo, lambda path: path.symlink_to(path.name), sparse])
def test_a_configuration_that_is_no_file_of_usual_size_is_named(damage, run):
    (run / CONFIG).unlink()
    damage(run / CONFIG)
    for read in (verify_run, load_run):
        with raises_line(run, CONFIG):
            read(run)


def test_a_field_that_the_task_refuses_is_in_a_named_file(run):
    text = (run / CONFIG).read_text()
    (run / CONFIG).write_text(text.replace("vit_nano_patch4_12", "vit_nano"))
    unseal(run)
    for read in (verify_run, load_run, reseal_run):
        with raises_line(run / CONFIG, "model.name"):
            read(run)


def test_every_region_of_the_configuration_is_part_of_the_seal(run):
    file = run / CONFIG
    whole = file.read_bytes()
    moments = random.Random(0)
    for first in range(0, len(whole), 100):
        content, place = bytearray(whole), first + moments.randrange(min(100, len(whole) - first))
        content[place] ^= 1
        file.write_bytes(content)
        for read in (load_run, record_of):
            with raises_line(CONFIG):
                read(run)
    file.write_bytes(whole)
    load_run(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("0.306", "0.9"),
        lambda text: text.replace("class_position: center", "class_position: unrotated"),
        lambda text: text + "# a note\n",
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.rstrip("\n"),
        lambda text: "",
    ],
)
def test_an_edited_configuration_is_refused(change, run):
    file = run / CONFIG
    text = file.read_text()
    assert change(text) != text
    file.write_bytes(change(text).encode())
    assert "reseal" in refused(CONFIG, "eval", run, "--quiet")


# Outputs


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_are_refused_in_any_view(value, run, digits, monkeypatch):
    build = type(task_of(digits)).build_model

    def overflowing(task):
        model = build(task)
        model.head.register_forward_hook(
            lambda *call: call[2].index_fill(1, torch.tensor(3), value)
        )
        return model

    monkeypatch.setattr(type(task_of(digits)), "build_model", overflowing)
    line = refused("resolution 24", "eval", run, "--resolutions", 24, "--quiet")
    assert "not finite" in line


@pytest.mark.slow
def test_outputs_of_a_detector_that_are_not_finite_are_refused():
    pytest.importorskip("pycocotools")
    config = load_recipe("scenes").with_overrides({"evaluate.resolutions": (), "data.workers": 0})
    trainer = trainer_of(config)
    with torch.no_grad():
        trainer.bare.roi_heads.box_predictor.cls_score.bias[0] = torch.nan
    with raises_line("resolution", "not finite"):
        trainer.finish()
    trainer.close()
