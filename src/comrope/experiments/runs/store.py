"""Finished runs by identity: in the folders of training, or in a few text files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from comrope._checks import one_line
from comrope._json import read_bytes
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.files import write_files
from comrope.experiments.config import (
    CONFIG,
    Config,
    load_recipe,
    read_config,
    run_id,
    run_name,
)
from comrope.experiments.runs.directory import RESULT
from comrope.experiments.runs.records import Record, merge, record_of

__all__ = [
    "FolderStore",
    "JsonlStore",
    "RunStore",
    "load_config",
    "open_store",
    "records_in",
    "run_folders",
]

ARCHIVE = "archive"  # folder in a store: runs that no study plans
RESULTS = Path("results")  # the default store
LARGEST = 2**30  # bytes of a file


class RunStore(Protocol):
    """Finished runs."""

    def ids(self) -> list[str]:
        """Return the identities of all runs."""
        ...

    def find(self, config: Config) -> Record | None:
        """Return the finished run of a configuration, or None."""
        ...


class FolderStore:
    """A folder with one folder per run; the names of these folders do not matter."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def ids(self) -> list[str]:
        return [name for name, folder in self._folders.items() if (folder / RESULT).is_file()]

    def find(self, config: Config) -> Record | None:
        return record_of(self.folder(config))

    def folder(self, config: Config) -> Path:
        """Return the folder of the run of a configuration, whether it exists or not."""
        usual = self.path / run_name(config)
        return usual if usual.is_dir() else self._folders.get(run_id(config), usual)

    def records(self) -> list[Record]:
        """Return all finished runs."""
        found = map(record_of, self._folders.values())
        return [record for record in found if record is not None]

    @cached_property
    def _folders(self) -> dict[str, Path]:
        """Folders with a configuration, by the identity of the run."""
        found = {}
        for file in sorted(self.path.glob(f"*/{CONFIG}")):
            with contextlib.suppress(UserError):  # for example a removed field
                found[run_id(*read_config(file.parent))] = file.parent
        return found


class JsonlStore:
    """A folder of JSON lines: one file per family of recipes, one line per run.

    Args:
        path: The folder. ``add`` creates it if needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def ids(self) -> list[str]:
        return list(self._records)

    def find(self, config: Config) -> Record | None:
        """Return the run of a configuration, or None.

        Raises:
            UserError: A line cannot be read, or was edited: its fields are of another run.
        """
        record = self._records.get(run_id(config))
        if record is not None and (found := run_id(record.config, record.parent)) != record.id:
            raise UserError(
                f"{self.path}: the run {record.id} has fields of the run {found}; remove its line, "
                "and store the run again with `comrope results add`"
            )
        return record

    def records(self) -> list[Record]:
        """Return all runs, file by file."""
        return list(self._records.values())

    def get(self, text: str) -> Record:
        """Return one run.

        Args:
            text: Its identity or the beginning of the identity, its name, or its name in the first
                schema. Archived runs are included.

        Raises:
            UserError: No run matches, or several.
        """
        every = self.records() + JsonlStore(self.path / ARCHIVE).records()
        exact = [r for r in every if text in (r.id, r.name, r.legacy)]
        found = exact or [r for r in every if text and r.id.startswith(text)]
        if len(found) != 1:
            names = ", ".join(r.id for r in found[:5])
            raise UserError(
                f"run: expected the identity or name of a run in {self.path}, got {text!r}, "
                + (f"which matches {names}" if found else "which matches none")
            )
        return found[0]

    def add(self, records: Iterable[Record], *, replace: bool = False) -> list[Record]:
        """Store runs; merge them with stored records of the same runs.

        Args:
            records: The runs.
            replace: Whether a new result replaces a different stored one of the same run.

        Returns:
            The runs that are new or changed.

        Raises:
            UserError: A run is stored with another result, or a file cannot be written.
        """
        every, changed = dict(self._records), []
        for record in records:
            stored = every.get(record.id)
            new = record if stored is None or replace else merge(stored, record)
            if new != stored:
                every[record.id] = new
                changed.append(new)
        families = {record.recipe for record in changed}
        families |= {self._records[r.id].recipe for r in changed if r.id in self._records}
        texts = {
            self.path / f"{family}.jsonl": _lines(r for r in every.values() if r.recipe == family)
            for family in families
        }
        write_files({file: _writer(text) for file, text in texts.items()})
        self.__dict__.pop("_records", None)
        return changed

    @cached_property
    def _records(self) -> dict[str, Record]:
        found: dict[str, Record] = {}
        places: dict[str, str] = {}
        for file in sorted(self.path.glob("*.jsonl")):
            for number, line in enumerate(_lines_of(file), 1):
                place = f"{file}, line {number}"
                try:
                    record = Record.from_json(line)
                except ValueError as error:
                    raise UserError(
                        f"{place}: {error}; remove the line, and store its run again with "
                        "`comrope results add`"
                    ) from None
                if found.setdefault(record.id, record) != record:
                    raise UserError(
                        f"{place}: the run {record.id} has another record in {places[record.id]}; "
                        "remove the line that is wrong"
                    )
                places.setdefault(record.id, place)
        return found


def open_store(path: Path) -> FolderStore | JsonlStore:
    """Return the store in a folder: JSON lines, or folders of runs in it or in its ``runs``.

    Raises:
        UserError: There is no such folder.
    """
    if not path.is_dir():
        raise UserError(f"store: expected a folder of runs or of .jsonl files, got {path}")
    if any(path.glob("*.jsonl")):
        return JsonlStore(path)
    return FolderStore(path / "runs" if (path / "runs").is_dir() else path)


def records_in(folder: Path) -> list[Record]:
    """Return the finished runs of a folder: of a run, of runs, or of a study's output.

    Raises:
        UserError: There is none.
    """
    if (folder / CONFIG).is_file():
        record = record_of(folder)
        found = [] if record is None else [record]
    else:
        store = open_store(folder)
        found = store.records()
    if not found:
        raise UserError(f"folder: expected finished runs, got none in {folder}")
    return found


def run_folders(folder: Path) -> list[Path]:
    """Return the finished runs of a folder, as ``records_in`` does, without reading them.

    Raises:
        UserError: There is none.
    """
    if (folder / CONFIG).is_file():
        return [folder]
    inside = folder / "runs" if (folder / "runs").is_dir() else folder
    if found := sorted(file.parent for file in inside.glob(f"*/{RESULT}")):
        return found
    raise UserError(f"folder: expected finished runs, got none in {folder}")


def load_config(name: str, method: str | None = None, perturbation: float | None = None) -> Config:
    """Load a recipe, or the configuration of a stored run.

    Args:
        name: As in ``load_recipe``; or "@ID" for a run in the folder ``results``, or "@STORE/ID".
        method: As in ``load_recipe``; not for stored runs.
        perturbation: As in ``load_recipe``; not for stored runs.

    Raises:
        UserError: There is no such recipe or run, or a method is given for a stored run.
    """
    if not name.startswith("@"):
        return load_recipe(name, method, perturbation)
    if method is not None or perturbation is not None:
        raise UserError(
            f"method, perturbation: expected none with {name}, because a stored run sets them"
        )
    folder, _, text = name.removeprefix("@").rpartition("/")
    return JsonlStore(Path(folder) if folder else RESULTS).get(text).config


def _lines_of(file: Path) -> list[bytes]:
    try:
        return read_bytes(file, largest=LARGEST).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)}); restore it") from None


def _lines(records: Iterable[Record]) -> str:
    ordered = sorted(records, key=lambda record: (record.name, record.id))
    return "".join(f"{record.to_json()}\n" for record in ordered)


def _writer(text: str) -> Callable[[Path], Any]:
    return lambda file: file.write_text(text, encoding="utf-8")
