"""JSON files: one reader, and one line for whatever is wrong with them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from support.faults import raises_line, refused

import comrope
from comrope import _json
from comrope._json import COUNT, NUMBER, TEXT, Entries, Items
from comrope.experiments.studies.report import report

SOURCE, ROOT = Path(comrope.__file__).parent, Path(__file__).parents[2]
BENCHES = ROOT / "benchmarks" / "results"
SCHEMA = Entries({"name": TEXT, "points": Items(Entries({"x": NUMBER}))}, {"count": COUNT}, None)
RIGHT = {"name": "a", "points": [{"x": 1}, {"x": 2.5}], "count": 3}
# Other files that read JSON, and why.
OTHERS = {
    "_json.py": "the reader",
    "experiments/runs/records.py": "a record as plain values",
    "experiments/runs/seal.py": "a result as it will be in its file",
    "experiments/studies/reproduce.py": "the paper's numbers as they will be in their file",
}


def test_all_files_are_read_by_one_reader():
    reads = re.compile(r"json\.loads?\(|JSONDecoder|raw_decode")
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if reads.search(path.read_text())
    }
    assert found <= OTHERS.keys()
    for name in found - {"_json.py"}:
        assert not re.search(r"json\.loads?\(.*read", (SOURCE / name).read_text()), name


# Content, and what the message names.
WRONG = {
    "a list": ("[]", "names and values"),
    "an entry is missing": ('{"name": "a"}', "points: "),
    "another entry": ('{"name": "a", "points": [], "more": 1}', "more: unknown"),
    "a text for a number": ('{"name": "a", "points": [{"x": 1}, {"x": "1"}]}', r"points\[1\]\.x: "),
    "true for a number": ('{"name": "a", "points": [{"x": true}]}', r"points\[0\]\.x: "),
    "NaN": ('{"name": "a", "points": [{"x": NaN}]}', r"points\[0\]\.x: .*finite.*nan"),
    "infinite": ('{"name": "a", "points": [{"x": 1e999}]}', r"points\[0\]\.x: .*finite.*inf"),
    "400 digits": ('{"name": "a", "points": [{"x": 1%s}]}' % ("0" * 400), r"points\[0\]\.x: "),
    "a count below 0": ('{"name": "a", "points": [], "count": -1}', "count: "),
    "a count of 1.0": ('{"name": "a", "points": [], "count": 1.0}', "count: "),
    "a name with line breaks": ('{"name": "a", "points": [], "b\\nc": 1}', r"'b\\nc': unknown"),
    "a very long name": ('{"name": "a", "points": [], "%s": 1}' % ("n" * 10**6), "unknown"),
    "a very long text": ('{"name": 1, "points": "%s"}' % ("n" * 10**6), "name: "),
    "twice": ('{"name": "a", "points": [], "name": "b"}', "'name' appears twice"),
    "deep lists": ("[" * 10**6, "40 lists"),
    "deep entries": ('{"a":' * 10**5, "40 lists"),
    "deep in the middle": ('{"name": %s}' % ("[" * 50 + "]" * 50), "40 lists"),
    "empty": ("", "Expecting value"),
    "cut off": ('{"name": "a', "JSON"),
    "two values": ("{}{}", "Extra data"),
    "single quotes": ("{'name': 'a'}", "JSON"),
    "a comment": ('{"name": "a"} // no', "JSON"),
    "half of a surrogate pair": ('{"name": "\\udfff", "points": []}', "Unicode"),
    "half of one in a name": ('{"name": "a", "points": [], "\\ud800": 1}', "Unicode"),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_is_named(how, tmp_path):
    text, named = WRONG[how]
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=named) as raised:
        _json.read(tmp_path / "a.json", SCHEMA)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{}", b'{"name": "\x80"}', b"\x00\x01", b"\xef\xbb\xbf{}"]
)
def test_other_encodings_are_refused(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"UTF-8|JSON"):
        _json.read(tmp_path / "a.json", SCHEMA)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="expected a file"):
            _json.read(path, SCHEMA)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="at most 16777216 bytes"):
        _json.read(tmp_path / "large", SCHEMA)
    with pytest.raises(FileNotFoundError):
        _json.read(tmp_path / "none", SCHEMA)


# Files of benchmarks and studies, in documents

BENCH = {
    "no machine": lambda c: c.pop("machine"),
    "a machine in words": lambda c: c.update(machine="a GPU"),
    "no date": lambda c: c["machine"].pop("date"),
    "no rows": lambda c: c.pop("rows"),
    "rows in words": lambda c: c.update(rows="many"),
    "an empty row": lambda c: c.update(rows=[{}]),
    "a row without a method": lambda c: c["rows"][0].pop("method"),
    "a speed in words": lambda c: c["rows"][0].update(images_per_second="fast"),
    "no speed": lambda c: c["rows"][0].update(images_per_second=None),
}


def mark(folder: Path, command: str) -> Path:
    document = folder / "a.md"
    document.write_text(f"<!-- {command} -->\nbefore\n<!-- end -->\n")
    return document


@pytest.mark.parametrize("how", BENCH)
def test_a_benchmark_of_another_form_is_one_line(how, tmp_path):
    content = json.loads((BENCHES / "training-h200.json").read_text())
    document, file = mark(tmp_path, "bench training --from b.json"), tmp_path / "b.json"
    file.write_text(json.dumps(content))
    report([document], ROOT / "results")
    BENCH[how](content)
    file.write_text(json.dumps(content))
    before = document.read_text()
    with raises_line("b.json", "write it again"):
        report([document], ROOT / "results")
    assert document.read_text() == before


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 10**5, b"\xff", b'{"machine": {}}'])
@pytest.mark.parametrize(
    "command", ["bench vit --from b.json", "reproduce cost --from b.json --part times"]
)
def test_a_damaged_file_of_results_is_one_line(command, content, tmp_path):
    (tmp_path / "b.json").write_bytes(content)
    refused("b.json", "report", mark(tmp_path, command), "--known", ROOT / "results")


def test_parts_and_tables_that_do_not_exist_are_named(tmp_path):
    shutil.copy(BENCHES / "cost-h200-eager.json", tmp_path / "b.json")
    for command, named in (
        ("reproduce cost --from b.json --part nosuch", "--part"),
        ("reproduce cost --from none.json", "none.json"),
        ("bench nosuch --from b.json", "b.json"),
    ):
        with raises_line(named):
            report([mark(tmp_path, command)], ROOT / "results")


# Jobs, and what is exported beside weights


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"cluster": "slurm"}', b'{"id": 3}', b"[" * 10**5]
)
def test_a_damaged_file_of_a_job_is_one_line(content, tmp_path):
    pytest.importorskip("submitit")
    from support.toy import curve

    from comrope.experiments.cluster import find_cluster
    from comrope.experiments.cluster.jobs import job_of
    from comrope.experiments.cluster.training_job import PLACE
    from comrope.experiments.launch import Run

    place = tmp_path / "run" / PLACE
    place.mkdir(parents=True)
    (place / "job.json").write_bytes(content)
    with raises_line("job.json", "remove the file"):
        job_of(Run(curve(), tmp_path / "run"), find_cluster("local", ""))
    assert sorted(path.name for path in place.iterdir()) == ["job.json", "lock"]


@pytest.mark.parametrize(
    "content",
    [b"[]", b'{"mean": "0.5"}', b'{"std": [null]}', b'{"crop_pct": NaN}', b"[" * 10**5, b"\xff"],
)
def test_damaged_notes_beside_a_model_are_one_line(content, tmp_path):
    from support.vits import nano

    nano(depth=0).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "preprocessing.json"
    file.write_bytes(content)
    refused(file, "export", tmp_path / "model", "--to", "safetensors", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
