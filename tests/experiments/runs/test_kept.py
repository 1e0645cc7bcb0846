"""The runs that are kept in the repository, by which documents are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from comrope.experiments.config import run_id, run_name
from comrope.experiments.runs.store import ARCHIVE, JsonlStore

RESULTS = Path(__file__).parents[3] / "results"
MOST_FILES = 12


@pytest.fixture(scope="module")
def records():
    return JsonlStore(RESULTS).records()


def test_their_identities_follow_from_their_configurations(records):
    ids = {record.id for record in records}
    for record in records:
        config = record.config
        assert (record.id, record.name) == (run_id(config), run_name(config))
        assert record.parent is None or record.parent in ids
        assert run_id(config.with_overrides({"data.root": "elsewhere"})) == record.id
        if not config.data.holdout:
            assert run_id(config.with_overrides({"data.holdout": 0.2})) != record.id


def test_nothing_is_there_twice(records):
    every = records + JsonlStore(RESULTS / ARCHIVE).records()
    for name in ("id", "name", "legacy"):
        found = [value for record in every if (value := getattr(record, name))]
        assert len(set(found)) == len(found)  # records of the present schema have no earlier name
    assert len(every) >= 395


def test_there_are_few_files_in_the_form_in_which_they_are_written(records, tmp_path):
    files = [file for file in RESULTS.rglob("*") if file.is_file()]
    assert len(files) <= MOST_FILES
    JsonlStore(tmp_path).add(records)
    for file in RESULTS.glob("*.jsonl"):
        assert (tmp_path / file.name).read_text() == file.read_text(), file
