"""WebDataset shards, read by index and not as a stream.

A stream can only be resumed by reading it from its start, and cannot be divided among another
number of processes. So the shards are indexed when the run starts. A sample is ``key.jpg`` (or
another image format) and its class, ``key.cls``.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.workers import start_server

__all__ = ["Shards", "split_names"]

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
SYNONYMS = (("train", "training"), ("val", "validation", "valid"))


def split_names(split: str) -> tuple[str, ...]:
    """Return a split's possible names, the given one first."""
    others = next((names for names in SYNONYMS if split in names), ())
    return (split, *(name for name in others if name != split))


class Shards:
    """The samples of all shards of a split: ``*train*.tar`` in the folder, or ``train/*.tar``."""

    def __init__(self, root: str, split: str, mode: str) -> None:
        self.mode = mode
        names = split_names(split)
        word = re.compile(rf"(^|[^a-z])({'|'.join(names)})([^a-z]|$)")  # not the val of "retrieval"
        found = [p for p in Path(root).glob("*.tar") if word.search(p.stem.lower())]
        inside = [p for name in names for p in (Path(root) / name).glob("*.tar")]
        self.paths = sorted({*found, *inside})
        if not self.paths:
            raise UserError(
                f"data.root: no shards of split {split!r} in {root}; expected *{split}*.tar or "
                f"{split}/*.tar"
            )
        start_server()
        context = multiprocessing.get_context("forkserver")
        with context.Pool(min(os.cpu_count() or 1, len(self.paths))) as pool:
            indexed = pool.map(_index, self.paths)
        self.keys = [key for keys, _ in indexed for key in keys]
        self.shard = np.repeat(np.arange(len(self.paths)), [len(keys) for keys, _ in indexed])
        self.places = np.concatenate([places for _, places in indexed])

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        return f"{self.paths[self.shard[index]]}: {self.keys[index]}"

    def load(self, index: int) -> tuple[Image.Image, int]:
        image_at, image_size, class_at, class_size = self.places[index].tolist()
        if min(image_size, class_size) < 0:
            raise ValueError("no image" if image_size < 0 else "no .cls")
        with self.paths[self.shard[index]].open("rb") as file:
            target = int(os.pread(file.fileno(), class_size, class_at))
            content = os.pread(file.fileno(), image_size, image_at)
        return Image.open(io.BytesIO(content)).convert(self.mode), target


def _index(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the keys of a shard, and the place of each sample in the file.

    A place is (image start, image length, class start, class length); the length is -1 if missing.
    """
    found: dict[str, list[int]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                suffix = f".{suffix.lower()}"
                if not member.isfile() or (suffix not in IMAGES and suffix != ".cls"):
                    continue
                entry = found.setdefault(f"{folder}/{stem}".lstrip("/"), [0, -1, 0, -1])
                first = 2 if suffix == ".cls" else 0
                entry[first : first + 2] = [member.offset_data, member.size]
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    return list(found), np.array(list(found.values()), dtype=np.int64).reshape(-1, 4)
