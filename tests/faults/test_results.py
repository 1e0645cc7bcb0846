"""Results, measurements and stored runs of another form than comrope writes: one line each."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.faults import change_json, flip_bit, pickled, raises_line, refused
from support.records import config_of, finish

from comrope.experiments.config import CONFIG
from comrope.experiments.runs.directory import RESULT, WEIGHTS, read_result
from comrope.experiments.runs.records import record_of
from comrope.experiments.runs.store import JsonlStore
from comrope.experiments.studies.measure import Runs
from comrope.experiments.training.train import is_finished, train
from comrope.experiments.training.verify import reseal_run, verify_run

RESULTS = {
    "no entries": b"{}",
    "a list": b"[]",
    "null": b"null",
    "a number": b"3",
    "a text": b'"top1"',
    "a list of the headline": b'{"top1": [1]}',
    "no headline": b'{"top1": null}',
    "an empty headline": b'{"top1": {}}',
    "a text for a number": b'{"top1": {"12": "50"}}',
    "true for a number": b'{"top1": {"12": true}}',
    "a list for a number": b'{"top1": {"12": [50]}}',
    "NaN": b'{"top1": {"12": NaN}}',
    "infinite": b'{"top1": {"12": -Infinity}}',
    "infinite as a number": b'{"top1": {"12": 1e999}}',
    "an integer of 400 digits": b'{"top1": {"12": 1' + b"0" * 400 + b"}}",
    "an integer of 5000 digits": b'{"top1": {"12": 1' + b"0" * 5000 + b"}}",
    "deep": b'{"top1": ' + b"[" * 100_000,
    "deep and closed": b'{"top1": {"12": 50}, "x": ' + b"[" * 60 + b"]" * 60 + b"}",
    "deep by names": b'{"top1": {"12": 50}, "x": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "empty": b"",
    "cut off": b'{"top1": {"12": 5',
    "no UTF-8": b'{"top1": {"12": 50}, "classes": ["\xff"]}',
    "UTF-16": '{"top1": {"12": 50}}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"top1": {"12": 50}}',
    "half of a surrogate pair": b'{"top1": {"12": 50}, "classes": ["\\ud800"]}',
    "an entry twice": b'{"top1": {"12": 50}, "top1": {"12": 99}}',
    "two values": b'{"top1": {"12": 50}} {}',
    "left out in words": b'{"top1": {"12": 50}, "left_out": {"crowds": "many"}}',
    "a number left out": b'{"top1": {"12": 50}, "left_out": 3}',
    "a machine in words": b'{"top1": {"12": 50}, "machine": "mine"}',
    "steps in words": b'{"top1": {"12": 50}, "steps": "many"}',
    "negative steps": b'{"top1": {"12": 50}, "steps": -1}',
    "classes that are numbers": b'{"top1": {"12": 50}, "classes": [1]}',
    "a confusion matrix of texts": b'{"top1": {"12": 50}, "confusion": [["1"]]}',
    "a pickle": pickled(Path("/nowhere/at/all")),
    "an empty seal": b'{"top1": {"12": 50}, "seal": {}}',
    "no seal": b'{"top1": {"12": 50}, "seal": null}',
    "a seal of texts": b'{"top1": {"12": 50}, "seal": {"config.yaml": "a", '
    b'"model.safetensors": "b", "result": "c"}}',
}


@pytest.mark.parametrize("how", RESULTS)
def test_a_result_of_another_form_is_one_line(how, run, digits):
    (run / RESULT).write_bytes(RESULTS[how])
    for read in (lambda: train(digits, run, progress=False), lambda: is_finished(digits, run)):
        if how == "an empty headline":  # it has no view yet
            assert not is_finished(digits, run)
            continue
        with raises_line(run / RESULT, "remove the file"):
            read()
    for read in (verify_run, reseal_run):
        if how != "an empty headline":
            with raises_line(run / RESULT):
                read(run)


def change_top1(result) -> None:
    result["top1"]["12"] += 0.01


@pytest.mark.parametrize(
    "change",
    [
        change_top1,
        lambda result: result.update(steps=12),
        lambda result: result.update(more=1),
        lambda result: result.pop("machine"),
        lambda result: result["top1"].update({"24": 50.0}),
        lambda result: result["seal"].update(result="0" * 64),
    ],
)
def test_an_edited_result_is_refused(change, run, tmp_path):
    change_json(run / RESULT, change)
    for command in (
        ("train", run / CONFIG, "--out", run, "--quiet"),
        ("results", "add", run, "--store", tmp_path / "store"),
        ("eval", run, "--quiet"),
    ):
        assert "reseal" in refused(RESULT, *command)


def test_the_order_and_layout_of_a_result_do_not_matter(run, digits):
    content = json.loads((run / RESULT).read_text())
    (run / RESULT).write_text(json.dumps(dict(reversed(content.items())), indent=8))
    verify_run(run)
    assert is_finished(digits, run)


def test_a_result_that_is_a_folder_or_a_pipe_is_refused(run):
    (run / RESULT).unlink()
    (run / RESULT).mkdir()
    with raises_line(run / RESULT):
        read_result(run)
    (run / RESULT).rmdir()
    os.mkfifo(run / RESULT)
    with raises_line(run / RESULT):
        read_result(run)


# Studies


def test_one_bad_result_in_a_study_is_named(tmp_path):
    runs = tmp_path / "runs"
    for seed in range(3):
        finish(runs / f"seed-{seed}", config_of(seed))
    bad = runs / "seed-1" / RESULT
    bad.write_text('{"top1": {"12": NaN, "8": 1}}')
    with raises_line(bad, "remove the file"):
        [Runs(runs).find(config_of(seed, evaluate__resolutions=(12, 8))) for seed in range(3)]
    for text in ("[]", "{"):
        bad.write_text(text)
        line = refused(bad, "reproduce", "classification", "--gather", "--out", tmp_path)
        assert "remove the file" in line


def test_a_study_refuses_changed_weights(run, digits):
    runs = Runs(run.parent)
    assert runs.find(digits).folder == run
    flip_bit(run / WEIGHTS, 2)
    assert runs.find(digits).folder == run  # once a command
    with raises_line(run / WEIGHTS):
        Runs(run.parent).find(digits)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"about": 1}',
        b'{"about": {}, "found": [1]}',
        b"\xff",
        b"[" * 10_000,
        b'{"a": 1, "a": 2}',
    ],
)
def test_a_damaged_measurement_is_one_line(content, run, digits):
    (run / "offset.json").write_bytes(content)
    for read in (record_of, Runs(run.parent).find):
        with raises_line(run / "offset.json", "remove the file"):
            read(run if read is record_of else digits)


LINES = {
    "cut off": lambda line: line[:200],
    "no UTF-8": lambda line: line.replace(b"digits", b"\xff\xfe"),
    "a list": lambda line: b"[" + line + b"]",
    "deep": lambda line: b"[" * 100_000,
    "no result": lambda line: line.replace(b'"result"', b'"results"'),
    "another identity": lambda line: line.replace(b'"id":"', b'"id":"../'),
    "a recipe that is a path": lambda line: line.replace(b'"recipe":"', b'"recipe":"../../'),
    "a recipe that is too long": lambda line: line.replace(
        b'"recipe":"', b'"recipe":"' + b"a" * 300
    ),
    "an unknown schema": lambda line: line.replace(b'"schema":', b'"schema":9'),
    "measured in words": lambda line: line.replace(
        b'"measured":{}', b'"measured":{"offset":"far"}'
    ),
    "fields in words": lambda line: line.replace(b'"runtime":{', b'"runtime":"x","y":{'),
    "losses in words": lambda line: line.replace(b'"loss":[', b'"loss":["high",'),
    "weights of a number": lambda line: line.replace(
        b'"config":{', b'"config":{"train.start_from":3,'
    ),
    "another parent": lambda line: line.replace(b'"parent":null', b'"parent":"0123456789ab"'),
    "another result of the run": lambda line: line.replace(b'"top1":{"12":', b'"top1":{"12":1'),
}


@pytest.mark.parametrize("how", LINES)
def test_a_damaged_line_of_stored_runs_is_named(how, run, tmp_path):
    store = JsonlStore(tmp_path / "store")
    store.add([record_of(run)])
    file = tmp_path / "store" / "digits.jsonl"
    line = file.read_bytes().strip()
    damaged = LINES[how](line)
    assert damaged != line
    file.write_bytes(b"\n".join([line, damaged]))
    with raises_line(f"{file}, line 2", "remove the line"):
        JsonlStore(tmp_path / "store").ids()


def test_a_line_may_be_repeated(run, tmp_path):
    (tmp_path / "store").mkdir()
    line = record_of(run).to_json()
    (tmp_path / "store" / "digits.jsonl").write_text(f"{line}\n{line}\n")
    assert len(JsonlStore(tmp_path / "store").records()) == 1


def test_a_run_moves_to_the_file_of_another_family(run, tmp_path):
    store, record = JsonlStore(tmp_path / "store"), record_of(run)
    store.add([replace(record, recipe="earlier")])
    store.add([record], replace=True)
    assert JsonlStore(tmp_path / "store").records() == [record]


def test_a_line_whose_fields_were_edited_is_not_the_result_of_these_fields(run, digits, tmp_path):
    record = record_of(run)
    JsonlStore(tmp_path).add([replace(record, fields={**record.fields, "optim.lr": 0.5})])
    with raises_line(tmp_path, record.id):
        JsonlStore(tmp_path).find(digits)


@pytest.mark.parametrize(
    "fields", [{"optim.lr": -1}, {"data.nam\ne": 1}, {"model.spread": "x" * 9999}]
)
def test_stored_fields_that_are_not_accepted_are_of_a_named_run(fields, run):
    record = replace(record_of(run), fields=fields)
    with raises_line(record.id):
        record.config  # noqa: B018


@pytest.mark.parametrize("damage", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.name)])
def test_a_store_or_measurement_that_is_no_file_is_named(damage, run, tmp_path):
    damage(tmp_path / "digits.jsonl")
    with raises_line(tmp_path / "digits.jsonl"):
        JsonlStore(tmp_path).ids()
    damage(run / "offset.json")
    with raises_line(run / "offset.json"):
        record_of(run)
