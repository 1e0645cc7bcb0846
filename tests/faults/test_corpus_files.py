"""Texts that cannot be used, and damaged corpora in the cache: one line, or built again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.faults import called, pickled, raises_line
from support.text import Texts, make_texts, make_tokenizer, prose, spoken

from comrope.experiments.data.corpus import CACHE, cache_folder, open_corpus
from comrope.experiments.data.tokenizers import Bytes
from comrope.experiments.tasks import task_of

# Damaged corpora


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def forge(path: Path, **changes: object) -> None:
    """Change the header and its checksum, as nobody would by accident."""
    import hashlib

    header = json.loads(path.read_text().splitlines()[0])
    header.update(changes)
    content = json.dumps(header)
    path.write_text(f"{content}\n{hashlib.sha256(content.encode()).hexdigest()}\n")


HEADER, TOKENS, STOPS = "corpus.json", "tokens.bin", "stops.bin"
DAMAGES = {
    "a flipped bit of the tokens": lambda folder: flip(folder / TOKENS),
    "a flipped bit of the stops": lambda folder: flip(folder / STOPS),
    "a flipped bit of the header": lambda folder: flip(folder / HEADER),
    "half of the tokens": lambda folder: os.truncate(folder / TOKENS, 500),
    "half of the stops": lambda folder: os.truncate(folder / STOPS, 8),
    "no tokens": lambda folder: (folder / TOKENS).unlink(),
    "empty stops": lambda folder: os.truncate(folder / STOPS, 0),
    "no header": lambda folder: (folder / HEADER).unlink(),
    "an empty header": lambda folder: os.truncate(folder / HEADER, 0),
    "a header of another format": lambda folder: forge(folder / HEADER, format=2),
    "a header with another dtype": lambda folder: forge(folder / HEADER, dtype="object"),
    "a header with more documents": lambda folder: forge(folder / HEADER, documents=9),
    "a pickle for a header": lambda folder: (folder / HEADER).write_bytes(
        pickled(folder / "marker")
    ),
    "a pickle for tokens": lambda folder: (folder / TOKENS).write_bytes(pickled(folder / "marker")),
    "a folder for tokens": lambda folder: to_folder(folder / TOKENS),
    "a pipe for the header": lambda folder: to_pipe(folder / HEADER),
    "a file for the folder": lambda folder: (shutil.rmtree(folder), folder.write_text("no")),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_corpus_is_built_again(how, capfd):
    texts = Texts([prose(1000).encode(), b"two", b"three"])
    first = open_corpus(texts, Bytes())
    expected = first.read(0, len(first)).tolist()
    DAMAGES[how](first.folder)
    again = open_corpus(texts, Bytes())
    assert again.read(0, len(again)).tolist() == expected
    assert again.digest == first.digest
    again.verify()
    assert not (first.folder / "marker").exists()
    missing = how in ("no tokens", "no header")
    assert (str(first.folder) in capfd.readouterr().err) != missing


# The cache


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with raises_line(tmp_path / "cache", CACHE):
        open_corpus(Texts([b"one"]), Bytes())


def test_a_full_disk_leaves_no_corpus(monkeypatch):
    from comrope.experiments.data import corpus

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus, "commit_directory", full)
    with raises_line("No space left", CACHE):
        open_corpus(Texts([b"one"]), Bytes())
    assert not [path for path in cache_folder().iterdir() if path.is_dir()]


# Texts


def text_run(root: Path, *more: str) -> tuple[object, ...]:
    out = root.parent / "run"
    return ("train", "language", "data.name=text", f"data.root={root}", "--out", out, "--quiet",
            "language.context=16", "language.lengths=1,2", "language.epoch_sequences=16",
            *more)  # fmt: skip


def wide(folder: Path) -> Path:
    """UTF-16, in which most bytes are no UTF-8."""
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_bytes(prose(3000).encode("utf-16"))
    return folder


CASES = {
    "empty files": (lambda f: make_texts(f, size=-1000), (), "data.root"),
    "no files": (lambda f: (f.mkdir(), f)[1], (), "data.root"),
    "nothing": (lambda f: f, (), "data.root"),
    "a context longer than every document": (
        lambda f: make_texts(f, files=30, size=50), ("language.context=2000",), "language.context"
    ),
    "a context longer than the text": (
        lambda f: make_texts(f, files=2), ("language.context=3300",), "language.context"
    ),
    "a length beyond the validation text": (
        make_texts, ("language.lengths=1,1000",), "language.lengths"
    ),
    "no such tokenizer": (make_texts, ("language.tokenizer=/no/where",), "language.tokenizer"),
    "more steps than sequences": (make_texts, ("train.batch_size=100000",), "train.batch_size"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_text_that_cannot_be_used_is_refused_before_anything_is_written(case, tmp_path):
    make, more, named = CASES[case]
    code, text = called(*text_run(make(tmp_path / "texts"), *more))
    lines = [line for line in text.splitlines() if line.startswith("comrope: ")]
    assert code == 2, text
    assert len(lines) == 1
    assert lines[0].startswith(f"comrope: {named}: ")
    assert not (tmp_path / "run").exists()


def test_bytes_accept_what_a_tokenizer_refuses(tmp_path):
    pytest.importorskip("transformers")
    root, tokenizer = wide(tmp_path / "texts"), make_tokenizer(tmp_path / "tokenizer")
    fields = {"data__name": "text", "data__root": str(root), "language__context": 64}
    with raises_line("data.root", root, "UTF-8"):
        task_of(spoken(**fields, language__tokenizer=str(tokenizer))).open()
    assert len(task_of(spoken(**fields)).open().train)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    root = make_texts(tmp_path / "texts")
    task = task_of(spoken(data__name="text", data__root=str(root)))
    before = Path.open

    def broken(path, *arguments, **options):
        if path.name == "3.txt":
            raise PermissionError(13, "Permission denied")
        return before(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", broken)
    with raises_line("data.root", "3.txt", "Permission denied"):
        task.open()
