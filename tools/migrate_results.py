"""Move the runs of results/runs, one folder each, into a store of a few text files. Done once.

    python tools/migrate_results.py results

Checks that every folder has the name that its configuration had in the first schema, that the new
identities are unique, that every parent is among the runs, and that nothing is lost. Runs that no
study plans go to results/archive, and all logs to results/logs-v1.tar.xz. The folder results/runs
is not removed.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import yaml
from identity_v1 import run_name as name_v1
from identity_v1 import to_v1

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import CONFIG, load_recipe, run_id
from comrope.experiments.config.build import flat
from comrope.experiments.runs.directory import LOG, RESULT
from comrope.experiments.runs.records import START, Record, record_of
from comrope.experiments.runs.store import ARCHIVE, JsonlStore
from comrope.experiments.studies import PRESETS, STUDIES, find_study
from comrope.experiments.studies.plan import Request
from comrope.experiments.studies.report import MARK, _request, _split

LARGEST_LOGS = 500_000  # bytes


def main(results: Path) -> None:
    """Migrate a folder of results."""
    folders = sorted(file.parent for file in (results / "runs").glob(f"*/{CONFIG}"))
    records = migrate(folders)
    planned = plans()
    stores = {True: JsonlStore(results), False: JsonlStore(results / ARCHIVE)}
    for is_planned, store in stores.items():
        store.add(record for record in records if (record.id in planned) == is_planned)
    kept = {r.id: r for store in stores.values() for r in JsonlStore(store.path).records()}
    for folder, record in zip(folders, records, strict=True):
        check(folder, kept[record.id])
    size = write_logs(folders, results / "logs-v1.tar.xz")
    counts = [len(JsonlStore(store.path).ids()) for store in stores.values()]
    print(f"{counts[0]} runs of studies, {counts[1]} others, {size} bytes of logs")


def migrate(folders: list[Path]) -> list[Record]:
    """Return the records of all runs, each with the name of its folder."""
    records: dict[str, Record] = {}
    children = []
    for folder in folders:
        tree = yaml.load((folder / CONFIG).read_text(), yaml.CSafeLoader)
        assert name_v1(to_v1(tree)) == folder.name, folder
        if tree["train"].get("start_from"):
            children.append((folder, Path(tree["train"]["start_from"]).name))
        else:
            records[folder.name] = read(folder)
    for folder, parent in children:
        record = read(folder, records[parent].id)
        assert record.parent == records[parent].id, folder
        records[folder.name] = record
    found = [records[folder.name] for folder in folders]
    assert len({record.id for record in found}) == len(folders)
    return found


def read(folder: Path, parent: str | None = None) -> Record:
    """Return the record of a finished run."""
    record = record_of(folder, parent)
    assert record is not None, folder
    return replace(record, legacy=folder.name)


def check(folder: Path, record: Record) -> None:
    """Raise unless a stored record has everything that the folder has."""
    assert record.legacy == folder.name
    assert record.id == run_id(record.config), folder
    before = load_recipe(folder / CONFIG)
    differ = {
        name
        for (name, one), two in zip(flat(before).items(), flat(record.config).values(), strict=True)
        if one != two
    }
    assert differ <= {START}, (folder, differ)
    assert json.dumps(record.result) == json.dumps(json.loads((folder / RESULT).read_text()))
    log = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    evaluations = [
        {name: value for name, value in each.items() if name not in ("event", "time")}
        for each in log
        if each["event"] == "evaluation"
    ]
    assert json.dumps(record.evaluations) == json.dumps(evaluations), folder
    files = {file.name for file in folder.iterdir()} - {CONFIG, RESULT, LOG}
    assert files == {f"{name}.json" for name in record.measured}, folder
    for name, value in record.measured.items():
        assert json.dumps(value) == json.dumps(json.loads((folder / f"{name}.json").read_text()))


def plans() -> set[str]:
    """Return the identities of all runs that a study plans, at a preset or in a document."""
    found = set()
    requests = [Request(study, preset) for study in STUDIES.values() for preset in PRESETS.values()]
    for document in Path("docs").glob("*.md"):
        for match in MARK.finditer(document.read_text()):
            verb, name, *words = shlex.split(match["command"])
            options, fields = _split(verb, words)
            if verb == "reproduce" and "from" not in options:
                requests.append(_request(find_study(name), options, fields))
    for request in requests:
        with contextlib.suppress(UserError):  # a study without this preset
            plan = request.plan(Path("runs"), gather=True)
            found |= {run_id(config) for configs in plan.rows.values() for config in configs}
    return found


def write_logs(folders: list[Path], archive: Path) -> int:
    """Write all logs into one archive, the same bytes every time; return its size."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for folder in folders:
            content = (folder / LOG).read_bytes()
            about = tarfile.TarInfo(f"{folder.name}/{LOG}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    size = archive.stat().st_size
    assert size <= LARGEST_LOGS, size
    return size


if __name__ == "__main__":
    main(Path(sys.argv[1]))
