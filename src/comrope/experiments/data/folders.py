"""Image folders, ``SPLIT/CLASS/IMAGE``, and tars of them, ``SPLIT.tar``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.archives import read_members, read_part
from comrope.experiments.data.files import shown, walk
from comrope.experiments.data.pictures import SUFFIXES, decode
from comrope.experiments.data.shards import split_names

__all__ = ["FolderImages", "find_split"]

TAR = ".tar"


class Found(NamedTuple):
    """An image in a folder or a tar."""

    name: str
    label: str  # the name of its class
    start: int = 0  # place of its first byte in the tar
    size: int = 0  # in bytes


class FolderImages:
    """Images in the folders of their classes, or in a tar of these folders.

    The class of an image is the innermost folder that it is in, or the tar in the tar. Classes and
    images are in the natural order of their names, in which 9 is before 10.

    Args:
        place: A folder or a tar.
        mode: Pillow's name of the channels, "RGB" or "L".
        exif: Whether the orientation in EXIF data is applied.

    Raises:
        UserError: There are no images, an image is in no class, a class has no images, a link leads
            to a folder that it is in, or the tar is damaged.
    """

    def __init__(self, place: Path, mode: str = "RGB", *, exif: bool = False) -> None:
        self.place, self.mode, self.exif = place, mode, exif
        self.is_tar = not place.is_dir()
        found = _in_tar(place) if self.is_tar else _in_folder(place)
        if not found:
            raise UserError(f"data.root: {place} has no images; formats are {', '.join(SUFFIXES)}")
        self.names = [image.name for image in found]
        labels = [image.label for image in found]
        self.classes = sorted(set(labels), key=lambda label: (_natural(label), label))
        index = {label: number for number, label in enumerate(self.classes)}
        self.targets = np.array([index[label] for label in labels])
        # (images, 2), places and sizes in the tar; none of files
        self.places = np.array([image[2:] for image in found if self.is_tar])

    def number_as(self, classes: Sequence[str]) -> None:
        """Number the classes by their places in ``classes``, which has all of them."""
        self.targets = np.array([classes.index(label) for label in self.classes])[self.targets]
        self.classes = list(classes)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        name = shown(self.names[index])
        return f"{self.place}: {name}" if self.is_tar else name

    def load(self, index: int) -> tuple[Image.Image, int]:
        image: str | bytes = self.names[index]
        if self.is_tar:
            with self.place.open("rb") as file:
                image = read_part(file, *self.places[index].tolist())
        return decode(image, self.mode, exif=self.exif), int(self.targets[index])


def find_split(root: str, split: str) -> Path:
    """Return the folder of a split, or its .tar."""
    for name in split_names(split):
        for place in (Path(root) / name, Path(root) / f"{name}{TAR}"):
            if place.is_dir() or (place.exists() and place.suffix == TAR):
                return place
    found = ", ".join(sorted(path.name for path in Path(root).iterdir())[:5])
    raise UserError(
        f"data.root: {root} has no folder or .tar for split {split!r}; found {found or 'nothing'}"
    )


def _in_folder(place: Path) -> list[Found]:
    top, found = str(place), []
    classes: list[str] = []
    for folder, folders, files in walk(top):
        images = [name for name in files if _is_image(name)]
        if folder == top:
            classes = folders
            if images:
                raise UserError(f"data.root: {place}: {shown(images[0])} is in no class folder")
        label = os.path.basename(folder)
        found += [Found(f"{folder}{os.sep}{name}", label) for name in images]
    if found and (empty := sorted({*classes} - {image.label for image in found})):
        raise UserError(f"data.root: class {empty[0]!r} has no images in {place}")
    # Names that differ in case or leading zeros only have one natural key. The order in which a
    # folder lists them differs between machines.
    return sorted(found, key=lambda image: (_natural(image.name[len(top) :]), image.name))


def _in_tar(place: Path) -> list[Found]:
    members = read_members(place, (*SUFFIXES, TAR))
    tars = [member for member in members if member.name.lower().endswith(TAR)]
    found: list[tuple[str, Found]] = []  # with the names that determine the order
    for tar in (*tars, None):
        inner = members if tar is None else read_members(place, SUFFIXES, tar)
        outer = "" if tar is None else os.path.basename(tar.name)[: -len(TAR)]
        prefix = "" if tar is None else f"{tar.name}: "
        for name, start, size in inner:
            if not _is_image(name):
                continue
            folders = [part for part in name.split("/")[:-1] if part not in ("", ".")]
            label = (outer, *folders)[-1]
            if not label:
                raise UserError(f"data.root: {place}: {shown(name)} is in no class folder")
            found.append((name, Found(prefix + name, label, start, size)))
    found.sort(key=lambda image: _natural(image[0]))
    return [image for _, image in found]


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _natural(text: str) -> list[str | int]:
    """Return a key by which texts are ordered as timm orders them."""
    parts = re.split(r"(\d+)", text.lower())
    return [int(part) if part.isdecimal() else part for part in parts]
