"""WebDataset shards, read by index and not as a stream.

A stream can only be resumed by reading it from its start, and cannot be divided among another
number of processes. So the shards are indexed when the run starts. A sample is ``key.jpg`` (or
another image format) and its class, ``key.cls``.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from comrope._checks import name_shown as shown
from comrope.experiments.common.errors import UserError
from comrope.experiments.data.archives import read_members, read_part
from comrope.experiments.data.pictures import SUFFIXES, decode
from comrope.experiments.data.workers import create_pool

__all__ = ["Shards", "split_names"]

CLASS = ".cls"
MAX_DIGITS = 20  # bytes of a class
SYNONYMS = (("train", "training"), ("val", "validation", "valid"))


def split_names(split: str) -> tuple[str, ...]:
    """Return a split's possible names, the given one first."""
    others = next((names for names in SYNONYMS if split in names), ())
    return (split, *(name for name in others if name != split))


class Shards:
    """The samples of all shards of a split: ``*train*.tar`` in the folder, or ``train/*.tar``."""

    def __init__(self, root: str, split: str, mode: str, *, exif: bool = False) -> None:
        self.mode, self.exif = mode, exif
        names = split_names(split)
        word = re.compile(
            rf"(^|[^a-z])({'|'.join(map(re.escape, names))})([^a-z]|$)"
        )  # not the val of "retrieval"
        found = [p for p in Path(root).glob("*.tar") if word.search(p.stem.lower())]
        inside = [p for name in names for p in (Path(root) / name).glob("*.tar")]
        self.paths = sorted({*found, *inside})
        if not self.paths:
            raise UserError(
                f"data.root: no shards of split {split!r} in {root}; expected *{split}*.tar or "
                f"{split}/*.tar"
            )
        with create_pool(len(self.paths)) as pool:
            indexed = pool.map(_index, self.paths)
        self.keys = [key for keys, _ in indexed for key in keys]
        self.shard = np.repeat(np.arange(len(self.paths)), [len(keys) for keys, _ in indexed])
        self.places = np.concatenate([places for _, places in indexed])

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        return f"{self.paths[self.shard[index]]}: {shown(self.keys[index])}"

    def load(self, index: int) -> tuple[Image.Image, int]:
        image_at, image_size, class_at, class_size = self.places[index].tolist()
        if min(image_size, class_size) < 0:
            raise ValueError("no image" if image_size < 0 else "no .cls")
        with self.paths[self.shard[index]].open("rb") as file:
            written = read_part(file, class_at, min(class_size, MAX_DIGITS + 1)).strip()
            if not written.isdigit() or class_size > MAX_DIGITS:
                raise ValueError(f"expected the number of a class in {CLASS}, got {written!r}")
            content = read_part(file, image_at, image_size)
        return decode(content, self.mode, exif=self.exif), int(written)


def _index(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the keys of a shard, and the place of each sample in the file.

    A place is (image start, image length, class start, class length); the length is -1 if missing.
    """
    found: dict[str, list[int]] = {}
    for name, start, size in read_members(path, (*SUFFIXES, CLASS)):
        folder, _, base = name.rpartition("/")
        stem, _, suffix = base.partition(".")
        suffix = f".{suffix.lower()}"
        if suffix != CLASS and suffix not in SUFFIXES:
            continue
        key = f"{folder}/{stem}".lstrip("/")
        entry = found.setdefault(key, [0, -1, 0, -1])
        first, what = (2, "classes") if suffix == CLASS else (0, "images")
        if entry[first + 1] >= 0:
            raise UserError(
                f"data.root: {path}: {shown(key)} has two {what}, the second is {shown(name)}; "
                "expected one"
            )
        entry[first : first + 2] = [start, size]
    if not found:
        raise UserError(f"data.root: {path}: has no samples, expected KEY.jpg and KEY{CLASS}")
    return list(found), np.array(list(found.values()), dtype=np.int64).reshape(-1, 4)
