"""JSON files of experiments: errors name the file and what to do. More in faults/test_json."""

from __future__ import annotations

import json

import pytest
from helpers import raises_for

from comrope._json import COUNT, Entries
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.json_files import check_json, read_json

SCHEMA = Entries({"count": COUNT})


def test_errors_name_the_file_the_entry_and_what_to_do(tmp_path):
    file = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        read_json(file, SCHEMA, "remove it")
    file.write_text(json.dumps({"count": 3}))
    assert read_json(file, SCHEMA, "remove it") == {"count": 3}
    file.write_text("{}")
    with raises_for(f"{file}: count", UserError, naming="remove it"):
        read_json(file, SCHEMA, "remove it")
    file.unlink()
    file.mkdir()
    with raises_for(str(file), UserError, naming="remove it"):
        read_json(file, SCHEMA, "remove it")


def test_values_that_were_read_are_checked():
    check_json({"count": 3}, SCHEMA, "here", "remove it")
    with raises_for("here: count", UserError, naming="remove it"):
        check_json({"count": -3}, SCHEMA, "here", "remove it")
