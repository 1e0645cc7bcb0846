"""Where images come from: timm's data sets, by name and path, and scikit-learn's digits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from comrope.experiments.config import Config, Data
from comrope.experiments.errors import UserError

__all__ = ["Cached", "Digits", "Source", "open_sources"]


class Source(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call image ``index`` when something is wrong with it."""

    def load(self, index: int) -> tuple[Image.Image, int]:
        """The decoded image and its class; an error of any kind if it cannot be read."""


class Digits:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8; every fifth validates."""

    def __init__(self, *, train: bool) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        chosen = (np.arange(len(digits.target)) % 5 != 0) == train
        self.images = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
        self.targets = digits.target[chosen]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"digit {index}"

    def load(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.targets[index])


class Timm:
    """A data set of timm's factory: an image folder, a tar of one, a Hugging Face data set, ..."""

    def __init__(self, dataset: Any, mode: str) -> None:
        self.dataset, self.mode = dataset, mode
        self.reader = getattr(dataset, "reader", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        try:
            return str(self.reader.filename(index, absolute=True))  # type: ignore[union-attr]
        except (AttributeError, NotImplementedError, AssertionError, TypeError, KeyError):
            return f"image {index}"

    def load(self, index: int) -> tuple[Image.Image, int]:
        # Through the reader: the data set itself would put another image in place of a bad one.
        image, target, *_ = (self.dataset if self.reader is None else self.reader)[index]
        if not isinstance(image, Image.Image):
            with image:
                return Image.open(image).convert(self.mode), int(target)
        return image.convert(self.mode), int(target)


class Cached:
    """Another source, decoded once and kept in memory (before loading processes are forked)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.items = list(pool.map(self._decode, range(len(source))))

    def _decode(self, index: int) -> tuple[Any, int] | Exception:
        try:
            image, target = self.source.load(index)
            return np.asarray(image), target
        except Exception as error:
            return error

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def load(self, index: int) -> tuple[Image.Image, int]:
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return Image.fromarray(item[0]), item[1]


def open_sources(config: Config, *, train: bool = True) -> tuple[Source | None, Source]:
    """The training source (None unless asked for) and the validation source, checked."""
    data = config.data
    if data.name == "digits":
        _check_classes(data, 10, "digits")
        return Digits(train=True) if train else None, Digits(train=False)
    train_set = _create(data, data.train_split)
    class_map = _class_map(data, train_set, data.train_split)
    val_set = _create(data, data.val_split, class_map)
    unknown = set(_class_map(data, _create(data, data.val_split), data.val_split) or ()) - set(
        class_map or ()
    )
    if unknown:
        raise UserError(
            f"data.root: split {data.val_split!r} of {data.root} has classes that "
            f"{data.train_split!r} has not: {', '.join(sorted(unknown)[:5])}"
        )
    mode = {1: "L", 3: "RGB"}.get(data.in_chans)
    if mode is None:
        raise UserError(f"data.in_chans: expected 1 or 3, got {data.in_chans}")
    opened = [Timm(dataset, mode) for dataset in (train_set, val_set)]
    for split, source in zip((data.train_split, data.val_split), opened, strict=True):
        if not len(source):
            raise UserError(f"data.root: split {split!r} of {data.root} has no images")
    sources: list[Source] = [Cached(s) if data.cache else s for s in opened[0 if train else 1 :]]
    return sources[0] if train else None, sources[-1]


def _create(data: Data, split: str, class_map: dict[str, int] | None = None) -> Any:
    from timm.data import create_dataset

    local = "/" not in data.name
    if local and data.name != "folder":
        raise UserError(
            f"data.name: expected digits, folder, or a name of timm's with its prefix (torch/, "
            f"hfds/), got {data.name!r}"
        )
    if data.name.split("/")[0] in ("wds", "hfids", "tfds"):
        raise UserError(
            f"data.name: {data.name!r} is a stream, which cannot be resumed exactly; expected a "
            "folder, a .tar of one, torch/ or hfds/"
        )
    if local and (data.root is None or not Path(data.root).exists()):
        raise UserError(f"data.root: no data at {data.root}; give its path, data.root=PATH")
    if local and Path(str(data.root)).is_dir():
        _check_split(data, split)
    name = "" if local else data.name
    try:
        return create_dataset(name, root=data.root, split=split, class_map=class_map or {})
    except (RuntimeError, OSError, ValueError, ImportError) as error:
        where = f"split {split!r} of {data.root or data.name}"
        raise UserError(f"data.root: {where} cannot be read: {error}") from None


def _check_split(data: Data, split: str) -> None:
    """The folder of a split must be there: timm would read the one above it instead."""
    from timm.data.dataset_factory import _search_split

    assert data.root is not None
    if Path(_search_split(data.root, split)) == Path(data.root) and split not in data.root:
        found = sorted(path.name for path in Path(data.root).iterdir() if path.is_dir())
        raise UserError(
            f"data.root: {data.root} has no folder for split {split!r}; found "
            f"{', '.join(found[:5]) or 'no folder at all'}"
        )


def _class_map(data: Data, dataset: Any, split: str) -> dict[str, int] | None:
    reader = getattr(dataset, "reader", None)
    classes = dict(getattr(reader, "class_to_idx", None) or {})
    if not classes:
        return None
    root = getattr(reader, "root", None)
    if root and Path(root).is_dir():
        folders = {path.name for path in Path(root).iterdir() if path.is_dir()}
        if empty := sorted(folders - set(classes)):
            raise UserError(
                f"data.root: class {empty[0]!r} of split {split!r} has no images in {root}"
            )
    if split == data.train_split:
        _check_classes(data, len(classes), f"{data.root}")
    return classes


def _check_classes(data: Data, found: int, where: str) -> None:
    if found != data.num_classes:
        raise UserError(f"data.num_classes: {where} has {found} classes, got {data.num_classes}")
