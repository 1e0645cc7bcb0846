"""Documents of a corpus: which texts are for training, which for validation."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from helpers import raises_for
from support.text import Texts, make_texts, prose

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.documents import FirstBytes, open_documents

SPLITS = ("train", "validation")


def content(documents) -> list[tuple[str, bytes]]:
    return [(name, b"".join(blocks)) for name, blocks in documents]


def names(documents) -> list[str]:
    return [Path(name).name for name, _ in documents]


def open_text(root: Path, **options):
    return open_documents("text", str(root), SPLITS, **options)


# The standard library


def test_the_standard_library_is_that_of_every_installation():
    """Only modules that no distribution of Python changes, leaves out or generates."""
    found = open_documents("stdlib", None, SPLITS)
    assert sys.version.split()[0] in found.train.title
    train, validation = found.train.names, found.validation.names
    assert len(train) > 200
    assert 0.05 < len(validation) / len(train) < 0.2
    assert train == sorted(train)
    assert not set(train) & set(validation)
    tops = {name.partition("/")[0].removesuffix(".py") for name in (*train, *validation)}
    assert tops <= sys.stdlib_module_names
    assert {"asyncio", "dataclasses", "inspect"} <= tops
    assert not tops & {"test", "idlelib", "site", "sysconfig", "encodings", "tkinter"}
    assert not any("test" in name.split("/") for name in (*train, *validation))
    with raises_for("data.root", UserError):
        open_documents("stdlib", "/somewhere", SPLITS)


# Files


def test_a_file_is_divided_at_a_line(tmp_path):
    text = "".join(f"line {number}\n" for number in range(1000)).encode()
    (tmp_path / "book.txt").write_bytes(text)
    for root in (tmp_path / "book.txt", tmp_path):
        (_, train), (_, rest) = (content(part)[0] for part in open_text(root))
        assert train + rest == text
        assert rest.startswith(b"line ")
        assert len(rest) == pytest.approx(len(text) / 10, abs=10)
        (_, less), (_, held) = (content(part)[0] for part in open_text(root, holdout=0.2))
        assert less + held == train
        assert len(held) == pytest.approx(len(train) / 5, abs=10)


def test_a_file_without_lines_is_divided_between_characters(tmp_path):
    (tmp_path / "wide.txt").write_text("∑" * 1001, encoding="utf-8")
    for part in open_text(tmp_path):
        assert set(content(part)[0][1].decode()) == {"∑"}


def test_a_folder_may_have_its_own_splits(tmp_path):
    make_texts(tmp_path / "train", 3)
    (tmp_path / "val.txt").write_text("held out")  # a synonym of validation
    found = open_text(tmp_path)
    assert names(found.train) == ["0.txt", "1.txt", "2.txt"]
    assert content(found.validation)[0][1] == b"held out"
    held = open_text(tmp_path, holdout=0.5)
    assert sorted(names(held.train) + names(held.validation)) == ["0.txt", "1.txt", "2.txt"]
    (tmp_path / "val.txt").unlink()
    with raises_for("data.root", UserError, naming="validation"):
        open_text(tmp_path)


def test_other_folders_are_divided_by_the_names_of_files(tmp_path):
    make_texts(tmp_path / "deep" / "er", 60, 20)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "no.txt").write_text("no")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    found = open_text(tmp_path)
    assert len(names(found.train)) + len(names(found.validation)) == 61
    assert 1 < len(names(found.validation)) < 15
    validation = set(names(found.validation))
    (tmp_path / "binary").unlink()  # the split of a file does not depend on others
    assert set(names(open_text(tmp_path).validation)) == validation - {"binary"}
    held = open_text(tmp_path, holdout=0.3)
    assert set(names(held.validation)) < set(names(found.train))
    assert not set(names(held.train)) & set(names(held.validation))


def test_the_signature_changes_with_every_write(tmp_path):
    def signature() -> list[str]:
        return [text for part in open_text(tmp_path) for text in part.signature()]

    path = make_texts(tmp_path, 3) / "1.txt"
    before, about = signature(), path.stat()
    assert signature() == before
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # the same size and time
    assert signature() != before


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 700, 5000])
def test_the_first_bytes_do_not_cut_characters(limit):
    texts = [prose(100, 1).encode(), b"", prose(900, 2).encode(), "größe".encode() * 100]
    first = FirstBytes(Texts(texts, block=7), limit)
    found = b"".join(text for _, text in content(first))
    assert b"".join(texts).startswith(found)
    assert min(limit, len(b"".join(texts))) - 3 <= len(found) <= limit
    found.decode()
    assert content(first) == content(first)


@pytest.mark.parametrize("make", ["nothing", "empty folder", "only hidden"])
def test_a_place_without_text_is_refused(make, tmp_path):
    root = tmp_path / "root"
    if make != "nothing":
        root.mkdir()
    if make == "only hidden":
        (root / ".hidden").write_text("no")
    with raises_for("data.root", UserError, naming=str(root)):
        open_text(root)
    with raises_for("data.root", UserError):
        open_documents("text", None, SPLITS)


# Hugging Face


class Table:
    """The part of ``datasets.Dataset`` that is used."""

    column_names = ("text", "number")
    _fingerprint = "abc"

    def __init__(self, texts: list) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def select_columns(self, columns):
        return self

    def iter(self, batch_size):
        for first in range(0, len(self.texts), batch_size):
            yield {"text": self.texts[first : first + batch_size]}


@pytest.fixture
def hub(monkeypatch):
    """A module ``datasets`` with two splits."""
    rows = {"train": [f"text {n}" for n in range(2500)], "test": ["one", "two"]}
    asked = []

    def load_dataset(path, subset, split, cache_dir):
        asked.append((path, subset, split, cache_dir))
        if split not in rows:
            raise ValueError(f"Unknown split {split}.\nShould be one of ...")
        return Table(rows[split])

    module = types.SimpleNamespace(load_dataset=load_dataset, __version__="5.2.0")
    monkeypatch.setitem(sys.modules, "datasets", module)
    return types.SimpleNamespace(rows=rows, asked=asked, module=module)


def test_rows_of_a_data_set(hub, tmp_path):
    found = open_documents("hfds/someone/texts:small", str(tmp_path), ("train", "test"))
    assert hub.asked[0] == ("someone/texts", "small", "train", str(tmp_path))
    assert [text for _, text in content(found.validation)] == [b"one", b"two"]
    assert len(content(found.train)) == 2500
    held = open_documents("hfds/a", None, ("train", "gone"), holdout=0.2)
    parts = [{text for _, text in content(part)} for part in held]
    assert not parts[0] & parts[1]
    assert len(parts[0]) + len(parts[1]) == 2500
    assert len(parts[1]) == pytest.approx(500, abs=80)
    assert len({"".join(part.signature()) for part in (*found, *held)}) == 4


def test_data_sets_that_cannot_be_read(hub):
    with raises_for("data.name", UserError, naming="'validation'"):
        open_documents("hfds/a", None, SPLITS)
    with raises_for("language.text_column", UserError, naming="'body'"):
        open_documents("hfds/a", None, ("train", "test"), column="body")
    hub.rows["test"] = [1]
    with raises_for("language.text_column", UserError, naming="int"):
        content(open_documents("hfds/a", None, ("train", "test")).validation)
    hub.module.__version__ = "2.21.0"
    with raises_for("data.name", UserError, naming="2.21"):
        open_documents("hfds/a", None, ("train", "test"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        with raises_for("data.name", UserError, naming="pip install"):
            open_documents("hfds/a", None, ("train", "test"))
