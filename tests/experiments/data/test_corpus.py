"""Corpora: joined documents in a memory map, built once; memory that does not grow with them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import raises_for
from support.text import Texts, make_texts, make_tokenizer, prose

from comrope.experiments.common.errors import UserError
from comrope.experiments.data import corpus as module
from comrope.experiments.data.corpus import CACHE, Corpus, cache_folder, open_corpus
from comrope.experiments.data.documents import open_documents
from comrope.experiments.data.tokenizers import Bytes, HubTokenizer

FULL = int(os.environ.get("COMROPE_CORPUS_BYTES", 2**26))  # 2**31 for the size in the issue
SOME = [b"", b"one", bytes(range(256)), b"", prose(2500, 1).encode(), b"\xff", b"\n" * 7]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def joined(texts: list[bytes], tokenizer=None) -> list[int]:
    """All documents and end tokens, the slow way."""
    tokenizer = tokenizer or Bytes()
    found = [tokenizer.end]
    for text in texts:
        if text:
            found += [*tokenizer.encode([text])[0].tolist(), tokenizer.end]
    return found


def test_any_window_is_that_of_the_joined_documents():
    corpus, expected = open_corpus(Texts(SOME), Bytes()), joined(SOME)
    assert len(corpus) == len(expected)
    assert corpus.documents == 5
    assert corpus.longest == max(map(len, SOME))
    assert corpus.bytes == sum(map(len, SOME))
    rng = random.Random(0)
    windows = [(0, 0), (0, 1), (0, len(expected)), (len(expected), 0), (1, 1)]
    windows += [sorted(rng.choices(range(len(expected) + 1), k=2)) for _ in range(300)]
    for first, last in windows:
        got = corpus.read(first, max(0, last - first))
        assert got.dtype == np.int64
        assert got.tolist() == expected[first : max(first, last)]
    for wrong in ((-1, 2), (len(expected), 1), (0, len(expected) + 1)):
        with pytest.raises(IndexError):
            corpus.read(*wrong)


def test_any_division_into_blocks_pieces_and_batches_gives_the_same_tokens(monkeypatch):
    digest = open_corpus(Texts(SOME), Bytes()).digest
    for size in (5, 64, 1000):
        with monkeypatch.context() as patch:
            patch.setenv(CACHE, f"{os.environ[CACHE]}{size}")
            patch.setattr(module, "PIECE", size)
            patch.setattr(module, "BATCH", 3 * size)
            assert open_corpus(Texts(SOME, block=1 + size // 2), Bytes()).digest == digest


def test_tokens_of_a_tokenizer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    tokenizer = HubTokenizer(str(make_tokenizer(tmp_path / "tokenizer")))
    texts = [prose(size, size).encode() for size in (30, 700, 2000)]
    corpus = open_corpus(Texts(texts), tokenizer)
    assert corpus.read(0, len(corpus)).tolist() == joined(texts, tokenizer)
    assert corpus.tokens.dtype == np.uint16
    assert corpus.bytes == sum(map(len, texts))
    monkeypatch.setattr(module, "PIECE", 300)  # long documents are divided at lines
    monkeypatch.setenv(CACHE, str(tmp_path / "other"))
    divided = open_corpus(Texts(texts), tokenizer)
    assert tokenizer.backend.decode(divided.read(0, len(divided)).tolist()) == (
        b"".join(texts).decode()
    )


def test_it_is_built_once(monkeypatch):
    corpus = open_corpus(Texts(SOME), Bytes())
    with monkeypatch.context() as patch:
        patch.setattr(module, "_build", lambda *_: pytest.fail("was built again"))
        again = open_corpus(Texts(SOME), Bytes())
    assert (again.folder, again.digest) == (corpus.folder, corpus.digest)
    other = open_corpus(Texts([*SOME, b"more"]), Bytes())
    assert other.folder != corpus.folder
    assert other.digest != corpus.digest
    left = [path.name for path in cache_folder().iterdir() if path.suffix != ".lock"]
    assert sorted(left) == sorted((corpus.folder.name, other.folder.name))


def test_the_digest_is_that_of_tokens_and_documents():
    one, other = (open_corpus(Texts(texts), Bytes()) for texts in ([b"ab", b"c"], [b"a", b"bc"]))
    assert one.digest != other.digest
    assert open_corpus(Texts([b"ab", b"", b"c"]), Bytes()).digest == one.digest


def test_a_pickle_is_a_path():
    corpus = open_corpus(Texts([b"x" * 100_000]), Bytes())
    sent = pickle.dumps(corpus)
    assert len(sent) < 1000
    assert pickle.loads(sent).read(0, 9).tolist() == corpus.read(0, 9).tolist()
    for path in corpus.folder.iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(sent)


def test_the_folder_of_the_cache(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache" / "corpora"
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert str(cache_folder()) == "/some/where/comrope/corpora"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache_folder()) == "/home/someone/.cache/comrope/corpora"


# Several processes


def opened(root: str, results) -> None:
    corpus = open_corpus(open_documents("text", root, ("train", "validation")).train, Bytes())
    results.put((corpus.digest, corpus.read(5, 100).tolist()))


@pytest.mark.slow
def test_several_processes_build_it_once(tmp_path, monkeypatch):
    root = str(make_texts(tmp_path / "texts", files=40, size=50_000))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=opened, args=(root, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert all(each == found[0] for each in found)
    assert len([path for path in cache_folder().iterdir() if path.is_dir()]) == 1


def never_ends(root: str) -> None:
    class Slow(Texts):
        def __iter__(self):
            for name, blocks in super().__iter__():
                yield name, blocks
                time.sleep(0.05)

    texts = [bytes([65 + number % 26]) * 2**16 for number in range(10_000)]
    module.BATCH = 2**16
    open_corpus(Slow(texts), Bytes())


@pytest.mark.slow
def test_a_killed_build_leaves_no_corpus_and_no_lock(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=never_ends, args=("",))
    process.start()
    pattern, deadline = ".writing-*/tokens.bin", time.monotonic() + 60
    while time.monotonic() < deadline:
        files = [*cache_folder().glob(pattern)]
        if files and files[0].stat().st_size:
            break
        time.sleep(0.01)
    process.kill()
    process.join()
    (left,) = cache_folder().glob(".writing-*")
    os.rename(left, left.with_name(f".writing-{'0' * 32}-1"))  # of another corpus
    folder = cache_folder() / left.name.split("-")[1]
    assert not folder.exists()
    killed = left.with_name(f".writing-{folder.name}-999")
    killed.mkdir()
    with module._locked(folder):
        assert not killed.exists()
        assert left.with_name(f".writing-{'0' * 32}-1").exists()


# Memory

MEASURE = """
import resource, sys
from pathlib import Path
from comrope.experiments.common.randomness import derive
from comrope.experiments.data.batches import Key
from comrope.experiments.data.corpus import open_corpus
from comrope.experiments.data.documents import open_documents
from comrope.experiments.data.sequences import Sequences
from comrope.experiments.data.tokenizers import load_tokenizer

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(l.split()[1]) for l in lines if l.startswith(("RssAnon", "RssShmem"))) / 1024

tokenizer = load_tokenizer(sys.argv[2])
before = anonymous(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
documents = open_documents("text", sys.argv[1], ("train", "validation")).train
corpus = open_corpus(documents, tokenizer)
built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before[1]
sequences = Sequences(corpus, 1024, seed=0)
for number in range(2000):
    sequences[Key(0, number, derive(number) % len(sequences))]
print(len(corpus), built, anonymous() - before[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["bytes", "tokenizer", "one file"])
def test_memory_does_not_grow_with_the_corpus(kind, tmp_path):
    """COMROPE_CORPUS_BYTES is the size, by default 64 MiB; a tokenizer gets an eighth."""
    name, size = "bytes", FULL
    if kind == "tokenizer":
        pytest.importorskip("transformers")
        name, size = str(make_tokenizer(tmp_path / "tokenizer")), FULL // 8
    texts = tmp_path / "texts"
    texts.mkdir()
    text = prose(2**20).encode()
    if kind == "one file":
        with (texts / "all.txt").open("wb") as file:
            for _ in range(size // len(text)):
                file.write(text)
    else:
        for number in range(size // len(text)):
            (texts / f"{number}.txt").write_bytes(text)
    command = [sys.executable, "-c", MEASURE, str(texts), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, building, reading = map(float, done.stdout.split())
    print(f"{kind}: {size / 2**20:.0f} MiB of text, {tokens:.0f} tokens, {building:.0f} MiB "
          f"to build, {reading:.0f} MiB afterwards")  # fmt: skip
    assert building < 120
    assert reading < (64 if kind == "tokenizer" else 40)  # a tokenizer itself takes up to 45


def test_without_text_there_is_no_corpus():
    with raises_for("data.root", UserError, naming="some texts"):
        open_corpus(Texts([b"", b""]), Bytes())
    assert not [path for path in cache_folder().iterdir() if path.is_dir()]
    with pytest.raises(FileNotFoundError):
        Corpus(cache_folder() / "none")
