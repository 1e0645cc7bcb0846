"""Corpora: the tokens of many documents in one memory-mapped file, built once and cached.

A corpus is a folder in the cache with the tokens of all documents, the places where documents end,
and a header with sizes and digests. It is built under a lock, written under another name and then
renamed. Its name is a digest of the documents and the tokenizer. A damaged one is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from comrope import _json
from comrope._files import commit_directory, remove, sha256_of
from comrope._json import COUNT, SHA256, Entries, Kind
from comrope.experiments.common.errors import UserError
from comrope.experiments.data.documents import Documents
from comrope.experiments.data.tokenizers import Tokenizer

__all__ = ["CACHE", "Corpus", "cache_folder", "open_corpus"]

CACHE = "COMROPE_CACHE"  # environment variable: the folder of the cache
FORMAT = 1
TOKENS, STOPS, HEADER = "tokens.bin", "stops.bin", "corpus.json"
FILE = Entries({"size": COUNT, "sha256": SHA256}, others=None)
SCHEMA = Entries(
    {
        "format": _json.constant(FORMAT),
        "dtype": Kind("uint8, uint16 or uint32", lambda v: v in ("uint8", "uint16", "uint32")),
        "end": COUNT,
        "documents": COUNT,
        "longest": COUNT,
        "bytes": COUNT,
        "files": Entries({TOKENS: FILE, STOPS: FILE}, others=None),
    },
    others=None,
)
BATCH = 2**20  # bytes of text that are encoded together
PIECE = 2**16  # bytes of a piece of a long document
MOST_PIECES = 4096  # in a batch


class Corpus:
    """Documents joined by end tokens: one before the first document, one after each.

    Args:
        folder: A folder that ``open_corpus`` wrote.

    Attributes:
        end: The end token.
        documents: Their number.
        longest: Tokens of the longest document.
        bytes: Bytes of the text of all documents.
        digest: A digest of all tokens and of where documents end.

    Pickles contain the path only, so all processes share the memory.

    Raises:
        OSError, ValueError: The folder does not exist, or is no complete corpus.
    """

    def __init__(self, folder: Path) -> None:
        content, *rest = _json.read_bytes(folder / HEADER).splitlines()
        if rest != [hashlib.sha256(content).hexdigest().encode()]:
            raise ValueError(f"{HEADER} does not have its checksum")
        header = _json.parse(content, SCHEMA)
        for name, about in header["files"].items():
            if (found := (folder / name).stat().st_size) != about["size"]:
                raise ValueError(f"{name}: expected {about['size']} bytes, got {found}")
        self.folder, self.header = folder, header
        self.end, self.documents, self.longest = (
            header[name] for name in ("end", "documents", "longest")
        )
        self.bytes = header["bytes"]
        sums = [header["files"][name]["sha256"] for name in (TOKENS, STOPS)]
        self.digest = hashlib.sha256("".join(sums).encode()).hexdigest()
        self.tokens = np.memmap(folder / TOKENS, header["dtype"], "r")
        self.stops = np.memmap(folder / STOPS, np.int64, "r")  # place after each end token
        if len(self.stops) != self.documents or len(self) != 1 + len(self.tokens) + self.documents:
            raise ValueError(f"{STOPS} does not fit {TOKENS}")

    def __len__(self) -> int:
        """Return the number of tokens, end tokens included."""
        return int(self.stops[-1])

    def read(self, first: int, count: int) -> np.ndarray:
        """Return tokens ``first`` to ``first + count - 1``, (count,), int64."""
        last = first + count
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"first: expected 0 to {len(self) - count}, got {first}")
        # Stops up to a place, with the end token before the first document.
        low, high = np.searchsorted(self.stops, (first, last), side="right")
        before = int(low) + (first > 0)
        ends = self.stops[low:high] - 1 - first
        if first == 0 and count:
            ends = np.concatenate(([0], ends))
        found = np.full(count, self.end, dtype=np.int64)
        inside = np.ones(count, dtype=bool)
        inside[ends] = False
        found[inside] = self.tokens[first - before : last - before - len(ends)]
        return found

    def verify(self) -> None:
        """Raise ``ValueError`` unless all files have the digests in the header."""
        for name, about in self.header["files"].items():
            if sha256_of(self.folder / name) != about["sha256"]:
                raise ValueError(f"{name} does not have its checksum")

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]
        if self.digest != state["digest"]:
            raise ValueError(f"{self.folder}: changed while it was in use")


def cache_folder() -> Path:
    """Return the folder of all corpora."""
    if chosen := os.environ.get(CACHE):
        return Path(chosen) / "corpora"
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "comrope" / "corpora"


def open_corpus(documents: Documents, tokenizer: Tokenizer) -> Corpus:
    """Return the corpus of some documents; build it unless it is in the cache.

    Several processes may call this at once: one of them builds, the others wait.

    Raises:
        UserError: There is no text, it cannot be read, or the cache cannot be written.
    """
    key = hashlib.sha256(f"corpus {FORMAT}\n{tokenizer.identity}\n".encode())
    try:
        for text in documents.signature():
            key.update(os.fsencode(text) + b"\0")
    except OSError as error:
        raise UserError(f"data.root: {error.filename} cannot be read ({error.strerror})") from None
    folder = cache_folder() / key.hexdigest()[:32]
    if (found := _read(folder)) is not None:
        return found
    try:
        with _locked(folder):
            if (found := _read(folder)) is not None:
                return found
            _build(documents, tokenizer, folder)
        return Corpus(folder)
    except OSError as error:
        raise UserError(
            f"the cache of corpora, {folder}, cannot be written ({error}); the variable {CACHE} "
            "sets another folder"
        ) from None


def _read(folder: Path) -> Corpus | None:
    """Return a verified corpus; None if there is none, or if it is damaged."""
    try:
        corpus = Corpus(folder)
        corpus.verify()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        print(f"corpus {folder} is damaged ({error}); building it again", file=sys.stderr)
        return None
    return corpus


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build a corpus; remove what killed ones left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in folder.parent.glob(f".writing-{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _build(documents: Documents, tokenizer: Tokenizer, folder: Path) -> None:
    temporary = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    temporary.mkdir()
    try:
        header = _write(documents, tokenizer, temporary)
        content = json.dumps(header)
        digest = hashlib.sha256(content.encode()).hexdigest()
        (temporary / HEADER).write_text(f"{content}\n{digest}\n", encoding="utf-8")
        if folder.exists() and not folder.is_dir():
            remove(folder)
        commit_directory(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(documents: Documents, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write tokens and stops of documents to a folder; return the header."""
    place, length, longest, count, text = 1, 0, 0, 0, 0  # the place after the last end token
    with (folder / TOKENS).open("wb") as tokens, (folder / STOPS).open("wb") as stops:
        for batch in _batches(documents, tokenizer.reads_bytes):
            ended = array("q")
            pieces = [piece for piece, _ in batch]
            for (piece, last), found in zip(batch, tokenizer.encode(pieces), strict=True):
                tokens.write(np.ascontiguousarray(found).data)
                length, text = length + len(found), text + len(piece)
                if last and length:
                    place, longest, count = place + length + 1, max(longest, length), count + 1
                    ended.append(place)
                    length = 0
            stops.write(ended.tobytes())
    if not count:
        raise UserError(f"data.root: {documents.title} has no text; expected at least one byte")
    sizes = {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
        for name in (TOKENS, STOPS)
    }
    return {
        "format": FORMAT,
        "dtype": tokenizer.dtype,
        "end": tokenizer.end,
        "documents": count,
        "longest": longest,
        "bytes": text,
        "files": sizes,
    }


Piece = tuple[bytes, bool]  # a part of a document, and whether it is the last one


def _batches(documents: Documents, reads_bytes: bool) -> Iterator[list[Piece]]:
    """Yield the pieces of all documents in lists of bounded size.

    Raises:
        UserError: A document cannot be read, or is not UTF-8 though the tokenizer needs it.
    """
    batch: list[Piece] = []
    size = 0
    for name, blocks in documents:
        offset = 0
        try:
            for piece, last in _pieces(blocks):
                if not reads_bytes:
                    piece.decode()
                offset += len(piece)
                batch.append((piece, last))
                size += len(piece)
                if size >= BATCH or len(batch) == MOST_PIECES:
                    yield batch
                    batch, size = [], 0
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.root: {name} is not UTF-8 (byte {offset + error.start}); expected UTF-8, or "
                "language.tokenizer=bytes, which accepts any bytes"
            ) from None
        except OSError as error:
            raise UserError(f"data.root: {name} cannot be read ({error.strerror})") from None
    if batch:
        yield batch


def _pieces(blocks: Iterator[bytes]) -> Iterator[Piece]:
    """Divide a document after ends of lines, or if there are none, between UTF-8 characters."""
    rest = b""
    for block in blocks:
        rest += block
        while len(rest) > PIECE:
            cut = rest.rfind(b"\n", 0, PIECE) + 1
            if not cut:
                cut = PIECE
                while cut > PIECE - 4 and rest[cut] & 0xC0 == 0x80:
                    cut -= 1
            yield rest[:cut], False
            rest = rest[cut:]
    yield rest, True
