"""Documents of a text corpus: Python's standard library, files and folders, Hugging Face data sets.

A split is a sequence of documents. Documents are read in blocks, so that none has to fit into
memory.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.shards import split_names

__all__ = ["Documents", "Files", "FirstBytes", "Rows", "TextSplits", "open_documents"]

BLOCK = 2**20  # bytes that are read at a time
VALIDATION = 0.1  # share of the text that validates where the data have no split of their own
HFDS = "hfds/"
OLDEST_DATASETS = 3  # earlier versions run code of data sets
# Modules of the standard library that distributions of Python change, leave out or generate. The
# others are the same everywhere for one version of Python.
LEFT_OUT = {
    "argparse", "ctypes", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "locale",
    "py_compile", "pydoc_data", "site", "sysconfig", "tempfile", "test", "tkinter", "turtledemo",
    "venv",
}  # fmt: skip
TESTS = ("test", "tests")  # folders inside of packages


class Documents(Protocol):
    """The documents of a split, in order.

    Attributes:
        title: What they are, in a few words.
    """

    @property
    def title(self) -> str: ...

    def __iter__(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yield the name of every document, and its content in blocks."""
        ...

    def signature(self) -> Iterator[str]:
        """Yield texts that change whenever the content may have changed."""
        ...


class TextSplits(NamedTuple):
    """The documents of both splits."""

    train: Documents
    validation: Documents


class Files:
    """Files below a folder, one document each.

    Args:
        title: What they are.
        root: The folder.
        names: Their paths in the folder, with slashes.
        first, last: The bytes of the only file that belong to the document.
    """

    def __init__(
        self, title: str, root: Path, names: Sequence[str], first: int = 0, last: int | None = None
    ) -> None:
        self.title, self.root, self.names = title, root, names
        self.first, self.last = first, last

    def __iter__(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        for name in self.names:
            path = self.root / name
            yield str(path), _blocks(path, self.first, self.last)

    def signature(self) -> Iterator[str]:
        yield f"files {self.first} {self.last}"
        for name in self.names:
            about = (self.root / name).stat()
            # Only the last of these numbers changes with every write and cannot be set.
            yield f"{name} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


class Rows:
    """Rows of a Hugging Face data set, one document each.

    Args:
        title: What they are.
        rows: The data set.
        column: The column with the text.
        held_out: The share of the rows that is held out; 0 for none.
        inside: Whether these are the rows that are held out, or the others.
    """

    def __init__(
        self, title: str, rows: Any, column: str, held_out: float = 0.0, inside: bool = False
    ) -> None:
        self.title, self.rows, self.column = title, rows, column
        self.held_out, self.inside = held_out, inside

    def __iter__(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        number = 0
        for batch in self.rows.select_columns([self.column]).iter(batch_size=1000):
            for text in batch[self.column]:
                name = f"row {number} of {self.title}"
                if not isinstance(text, str):
                    raise UserError(
                        f"language.text_column: expected texts in {self.column!r}, {name} has a "
                        f"{type(text).__name__}"
                    )
                if _is_held_out(f"row {number}", self.held_out) == self.inside:
                    yield name, iter((text.encode("utf-8", "surrogatepass"),))
                number += 1

    def signature(self) -> Iterator[str]:
        yield f"rows {self.column} {self.held_out!r} {self.inside} {len(self.rows)}"
        yield str(self.rows._fingerprint)  # of the files and all changes since


class FirstBytes:
    """The first bytes of some documents; the last document may be cut.

    Args:
        documents: The documents.
        limit: The number of bytes, or up to three fewer, so that no UTF-8 character is cut.
    """

    def __init__(self, documents: Documents, limit: int) -> None:
        self.documents, self.limit = documents, limit

    @property
    def title(self) -> str:
        return f"the first {self.limit} bytes of {self.documents.title}"

    def __iter__(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        self._left = self.limit
        for name, blocks in self.documents:
            yield name, self._cut(blocks)
            if self._left <= 0:
                return

    def _cut(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            end = min(self._left, len(block))
            while end < len(block) and end > 0 and block[end] & 0xC0 == 0x80:
                end -= 1  # inside of a character
            self._left = 0 if end < len(block) else self._left - end
            yield block[:end]
            if self._left <= 0:
                return

    def signature(self) -> Iterator[str]:
        yield f"first {self.limit}"
        yield from self.documents.signature()


def open_documents(
    name: str,
    root: str | None,
    splits: tuple[str, str],
    *,
    holdout: float = 0.0,
    column: str = "text",
) -> TextSplits:
    """Return the documents of a corpus for training and validation.

    Args:
        name: "stdlib", the source of Python's standard library; "text", files at ``root``;
            "hfds/NAME" or "hfds/NAME:SUBSET", a data set of Hugging Face.
        root: For "text": a file, whose last tenth validates; or a folder. If the folder contains
            both splits as folders or files (``validation``, ``validation.txt``), they are used.
            Otherwise a tenth of the files validates, selected by a hash of their paths. For "hfds",
            the folder for downloads.
        splits: Names of the splits for training and validation.
        holdout: Share of the training documents that validates instead.
        column: The column of a data set that contains the text.

    Raises:
        UserError: There are no such documents.
    """
    if name == "stdlib":
        if root is not None:
            raise UserError(f"data.root: expected none for stdlib, got {root}")
        return _files_by_hash(*_standard_library(), holdout)
    if name.startswith(HFDS):
        return _data_set(name, root, splits, holdout, column)
    if root is None:
        raise UserError("data.root: not given; pass a text file or a folder of them, --data PATH")
    place = Path(root)
    if place.is_file():
        return _one_file(place, holdout)
    if not place.is_dir():
        raise UserError(f"data.root: {root} does not exist; expected a text file or a folder")
    found = [_split_of(place, split) for split in splits]
    own = [Files(f"{place.name}/{each[0]}", place, each[1]) for each in found if each]
    if len(own) == 2:
        train, validation = own
        if not holdout:
            return TextSplits(train, validation)
        return _hold_out(train, holdout)
    if own:
        missing = splits[found.index(None)]
        raise UserError(
            f"data.root: {root} has a folder or file of one split, but none named {missing!r}; "
            "expected both, or none"
        )
    names = _names_in(place)
    if len(names) == 1:
        return _one_file(place / names[0], holdout)
    return _files_by_hash(place.name, place, names, holdout)


def _standard_library() -> tuple[str, Path, list[str]]:
    root = Path(sysconfig.get_path("stdlib"))
    modules = sys.stdlib_module_names - LEFT_OUT
    names = [
        name
        for name in _names_in(root, ".py", lambda folder: folder in modules)
        if name.partition("/")[0].removesuffix(".py") in modules
    ]
    return f"the standard library of Python {platform.python_version()}", root, names


def _names_in(root: Path, suffix: str = "", wanted: Any = lambda folder: True) -> list[str]:
    """Return the sorted paths of the files below a folder, without hidden ones.

    Args:
        root: The folder.
        suffix: The end of the names.
        wanted: Function from the name of a folder in ``root`` to whether it is searched. If it
            selects folders, folders of tests are left out.
    """
    found = []
    for folder, inside, files in os.walk(root):
        place = Path(folder).relative_to(root).as_posix()
        if place == ".":
            inside[:] = [name for name in inside if wanted(name)]
        inside[:] = [name for name in inside if not name.startswith(".")]
        if suffix:
            inside[:] = [name for name in inside if name not in TESTS]
        prefix = "" if place == "." else f"{place}/"
        found += [
            prefix + name
            for name in files
            if name.endswith(suffix)
            and not name.startswith(".")
            and os.path.isfile(os.path.join(folder, name))
        ]
    if not found:
        raise UserError(f"data.root: {root} has no text files; expected at least one")
    return sorted(found)


def _split_of(root: Path, split: str) -> tuple[str, list[str]] | None:
    """Return the name of a split's folder or file and its paths; None if there is none."""
    for name in split_names(split):
        if (root / name).is_dir():
            return name, [f"{name}/{each}" for each in _names_in(root / name)]
        files = sorted(path.name for path in root.glob(f"{name}.*") if path.is_file())
        if files:
            return name, files
    return None


def _files_by_hash(title: str, root: Path, names: list[str], holdout: float) -> TextSplits:
    """Return files with a tenth for validation, selected by a hash of their paths.

    Files for validation are in the order of the hash, so the first ones are a random sample.
    """
    order = sorted(names, key=_share)
    count = max(1, sum(_share(name) < VALIDATION for name in names))
    chosen = set(order[:count])
    train = Files(title, root, [name for name in names if name not in chosen])
    if holdout:
        return _hold_out(train, holdout)
    return TextSplits(train, Files(f"{title}, held out", root, order[:count]))


def _hold_out(train: Files, share: float) -> TextSplits:
    """Divide the files for training."""
    inside = [name for name in train.names if _is_held_out(name, share)]
    others = [name for name in train.names if not _is_held_out(name, share)]
    if not inside or not others:
        raise UserError(
            f"data.holdout: expected a share with some of the {len(train.names)} training files "
            f"in both parts, got {share:g}"
        )
    order = sorted(inside, key=_share)
    return TextSplits(
        Files(train.title, train.root, others), Files(f"{train.title}, held out", train.root, order)
    )


def _one_file(path: Path, holdout: float) -> TextSplits:
    """Return the parts of one file: its end validates."""
    size = path.stat().st_size
    last = _line_start(path, int(size * (1 - VALIDATION)))
    first, end = last, size
    if holdout:
        first, end = _line_start(path, int(last * (1 - holdout))), last
    return TextSplits(
        Files(path.name, path.parent, [path.name], 0, first),
        Files(f"{path.name}, held out", path.parent, [path.name], first, end),
    )


def _line_start(path: Path, place: int) -> int:
    """Return the first start of a line at or after a byte; without one, of a UTF-8 character."""
    with path.open("rb") as file:
        file.seek(place)
        block = file.read(BLOCK)
    end = block.find(b"\n")
    if end >= 0:
        return place + end + 1
    start = next((n for n, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)
    return place + start


def _data_set(
    name: str, cache: str | None, splits: tuple[str, str], holdout: float, column: str
) -> TextSplits:
    found = []
    for split in splits[: 1 if holdout else 2]:
        rows = _load(name, cache, split)
        if column not in rows.column_names:
            raise UserError(
                f"language.text_column: {name} has the columns {', '.join(rows.column_names)}, got "
                f"{column!r}"
            )
        found.append(rows)
    titles = [f"{name}, {split}" for split in splits]
    if holdout:
        return TextSplits(
            Rows(titles[0], found[0], column, holdout),
            Rows(f"{titles[0]}, held out", found[0], column, holdout, inside=True),
        )
    train, validation = (Rows(*each, column) for each in zip(titles, found, strict=True))
    return TextSplits(train, validation)


def _load(name: str, cache: str | None, split: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(f"data.name: {name} needs datasets: pip install datasets") from None
    if int(datasets.__version__.split(".")[0]) < OLDEST_DATASETS:
        raise UserError(
            f"data.name: {name} needs datasets {OLDEST_DATASETS}.0 or newer, found "
            f"{datasets.__version__}: pip install -U datasets"
        )
    path, _, subset = name.removeprefix(HFDS).partition(":")
    try:
        return datasets.load_dataset(path, subset or None, split=split, cache_dir=cache)
    except Exception as error:  # of many kinds, from several libraries
        reason = " ".join(str(error).split())
        raise UserError(f"data.name: split {split!r} of {name} cannot be read ({reason})") from None


def _blocks(path: Path, first: int, last: int | None) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(first)
        left = BLOCK if last is None else last - first
        while left > 0 and (block := file.read(min(BLOCK, left))):
            yield block
            left -= 0 if last is None else len(block)


def _share(name: str) -> float:
    """Return a number from 0 to 1 that depends on a name only."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


def _is_held_out(name: str, share: float) -> bool:
    return _share(f"holdout {name}") < share
