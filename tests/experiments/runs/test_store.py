"""Finished runs in folders and in text files: found by what they are, merged, listed, exported."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.records import OFFSETS, config_of, finish

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import (
    CONFIG,
    load_recipe,
    run_id,
    run_name,
    runtime,
)
from comrope.experiments.runs.records import record_of
from comrope.experiments.runs.store import (
    FolderStore,
    JsonlStore,
    load_config,
    open_store,
    records_in,
)


def test_runs_in_folders_are_found_whatever_their_folders_are_called(tmp_path):
    store, configs = FolderStore(tmp_path), [config_of(seed) for seed in range(3)]
    finish(tmp_path / "mine", configs[0])
    finish(tmp_path / run_name(configs[1]), configs[1])
    finish(tmp_path / run_name(configs[2]), configs[2], finished=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CONFIG).write_text("train: {epoch: 3}")
    assert sorted(store.ids()) == sorted(map(run_id, configs[:2]))
    assert store.find(configs[0]) == record_of(tmp_path / "mine")
    assert store.find(configs[1]).config == configs[1]
    assert store.find(configs[2]) is store.find(config_of(9)) is None
    assert store.folder(configs[0]) == tmp_path / "mine"
    assert store.folder(config_of(9)) == tmp_path / run_name(config_of(9))


def test_a_run_that_another_starts_from_is_known_by_its_identity(tmp_path):
    parent = finish(tmp_path / "runs" / "ape", config_of(model__position="ape"))
    child = config_of(train__start_from=str(parent))
    folder = finish(tmp_path / "runs" / "child", child)
    record = record_of(folder)
    assert record.parent == record_of(parent).id
    assert record.fields["train.start_from"] == f"@{record.parent}"
    assert run_id(record.config) == record.id == run_id(child)
    assert JsonlStore(tmp_path / "none").find(child) is None
    store = JsonlStore(tmp_path / "store")
    store.add(records_in(tmp_path))
    assert store.find(child) == record
    assert store.get(record.id).config.train.start_from == f"@{record.parent}"


def test_a_store_has_a_file_for_every_family_with_sorted_lines(tmp_path):
    configs = [config_of(seed, name) for seed in (1, 0) for name in ("moving", "digits")]
    records = [record_of(finish(tmp_path / "runs" / str(i), c)) for i, c in enumerate(configs)]
    store = JsonlStore(tmp_path / "store")
    assert store.ids() == []
    assert store.add(records[:3]) == records[:3]
    assert store.add(records) == records[3:]
    files = sorted((tmp_path / "store").iterdir())
    assert [file.name for file in files] == ["digits.jsonl", "moving.jsonl"]
    lines = files[0].read_text().splitlines()
    assert [json.loads(line)["config"].get("train.seed", 0) for line in lines] == [0, 1]
    for opened in (store, open_store(tmp_path / "store"), FolderStore(tmp_path / "runs")):
        assert sorted(opened.ids()) == sorted(r.id for r in records)
        for config, record in zip(configs, records, strict=True):
            assert opened.find(config) == record


def test_views_and_measurements_of_the_same_run_are_merged(tmp_path):
    config, store = config_of(), JsonlStore(tmp_path / "store")
    few = record_of(finish(tmp_path / "few", config, {"12": 50.0}))
    more = record_of(finish(tmp_path / "more", config, {"12": 50.0, "8": 40.0}))
    other = record_of(finish(tmp_path / "other", config, {"12": 51.0}))
    store.add([replace(few, measured={"offset": OFFSETS})])
    assert len(store.add([more])) == 1
    assert store.add([few, more]) == []
    (known,) = JsonlStore(store.path).records()
    assert known == replace(more, measured={"offset": OFFSETS})
    with pytest.raises(UserError, match=f"run {few.id}: .*top1"):
        store.add([other])
    assert JsonlStore(store.path).records() == [known]
    store.add([other], replace=True)
    assert JsonlStore(store.path).records() == [other]


def test_a_stored_run_by_its_identity_or_name(tmp_path):
    store = JsonlStore(tmp_path / "store")
    config = config_of(data__workers=3)
    record = replace(record_of(finish(tmp_path / "run", config)), legacy="its-first-name")
    store.add([record])
    for text in (record.id, record.id[:4], record.name, "its-first-name"):
        assert store.get(text) == record
    for text in ("", "none", f"{record.id}0"):
        with pytest.raises(UserError, match="run"):
            store.get(text)
    assert load_config(f"@{store.path}/{record.id}") == config
    assert runtime(load_config(f"@{store.path}/{record.id[:5]}")) == runtime(config)
    assert load_config("digits", "ape", 0.5) == load_recipe("digits", "ape", 0.5)
    with pytest.raises(UserError, match="method"):
        load_config(f"@{store.path}/{record.id}", "ape")


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "digits.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"digits\.jsonl, line 1"):
        JsonlStore(tmp_path).ids()


def test_folders_without_runs_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="folder"):
            records_in(folder)
