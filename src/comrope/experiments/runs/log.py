"""The log of a run: JSON lines and TensorBoard. Nothing that resumes or finishes needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comrope import _json
from comrope._checks import one_line
from comrope._json import COUNT, NUMBER, TEXT, Entries
from comrope.experiments.common.console import now, say
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_text
from comrope.experiments.runs.board import Board
from comrope.experiments.runs.directory import LOG

__all__ = ["Log", "read_log"]

LARGEST = 2**30  # bytes of a log
RECORD = Entries({"event": TEXT}, {"step": COUNT})
# What records of these events have besides.
BY_EVENT = {
    "train": Entries({"step": COUNT, "loss": NUMBER}),
    "evaluation": Entries({"epoch": NUMBER}),
}


class Log:
    """Append records of a run; a resume removes the records of the steps that it repeats."""

    def __init__(self, folder: Path, *, resume_from: int) -> None:
        self.path = folder / LOG
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"{self.path}: expected a file, got something else; move it away")
        if self.path.is_file():
            if (size := self.path.stat().st_size) > LARGEST:  # would be replaced by an empty one
                raise UserError(
                    f"{self.path}: expected at most {LARGEST} bytes, got {size}; move it away"
                )
            kept = [r for r in read_log(self.path) if r.get("step", 0) <= resume_from]
            kept.append({"event": "resumed", "step": resume_from, "time": now()})
            write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self.board = Board(folder / "tensorboard", resume_from=resume_from)

    def write(self, event: str, **values: Any) -> None:
        record = {"event": event, **values, "time": now()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        scalars = {
            f"{event}/{name}": value
            for name, value in values.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        self.board.add(values.get("step", 0), scalars)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, without an incomplete last line; none if there is no file.

    Other lines that are no records are left out, and counted in a message. A log that cannot be
    read has no records.
    """
    if not path.is_file():
        return []
    try:
        *lines, last = _json.read_bytes(path, largest=LARGEST).split(b"\n")
    except (OSError, ValueError) as error:
        say(f"{path}: cannot be read ({one_line(error)}), left out")
        return []
    records = [_record(line) for line in lines if line]
    if wrong := records.count(None):
        noun = "line that is no record" if wrong == 1 else "lines that are no records"
        say(f"{path}: {wrong} {noun}, left out")
    return [record for record in (*records, _record(last)) if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None if it has none."""
    try:
        record: dict[str, Any] = _json.parse(line, RECORD)
        _json.check(record, BY_EVENT.get(record["event"], RECORD))
    except ValueError:
        return None
    return record
