"""Where images come from: timm's data sets, by name and path, and scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, Data
from comrope.experiments.data.holdout import held_out
from comrope.experiments.data.shards import Shards, split_names
from comrope.experiments.data.workers import Kept

__all__ = ["Cached", "Digits", "Source", "check_classes", "mode_of", "open_sources", "root_of"]


# Besides timm's own .png, .jpg and .jpeg: it would pass over the others in silence.
FORMATS = (".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
STREAMS = ("wds", "hfids", "tfds")


class Source(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call image ``index`` when something is wrong with it."""

    def load(self, index: int) -> tuple[Image.Image, int]:
        """The decoded image and its class; an error of any kind if it cannot be read."""


class Digits:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8; every fifth validates."""

    def __init__(self, *, train: bool, mode: str = "L") -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        chosen = (np.arange(len(digits.target)) % 5 != 0) == train
        self.images = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
        self.targets, self.mode = digits.target[chosen], mode

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"digit {index}"

    def load(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]).convert(self.mode), int(self.targets[index])


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
    """Another source, decoded once and kept in memory that all loading processes share."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.kept = Kept(len(source), self._decode, "images")

    def _decode(self, index: int) -> tuple[int, list[Image.Image]]:
        image, target = self.source.load(index)
        return target, [image]

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def load(self, index: int) -> tuple[Image.Image, int]:
        target, _ = self.kept.load(index)
        return Image.fromarray(self.kept.picture(index)), target


def open_sources(config: Config, *, train: bool = True) -> tuple[Source | None, Source]:
    """The training source (None unless asked for) and the validation source, checked."""
    data = config.data
    if config.detects:
        from comrope.experiments.data.boxes import open_boxed

        return open_boxed(config, train=train)  # type: ignore[return-value]
    if data.frames:
        from comrope.experiments.data.videos import open_clips

        return open_clips(data, train=train)  # type: ignore[return-value]
    opened: list[Source]
    if data.holdout:
        (whole,) = _opened(data, [data.train_split])
        opened = [*held_out(whole, data.holdout)][0 if train else 1 :]
    else:
        opened = _opened(data, [data.train_split, data.val_split][0 if train else 1 :])
    if data.cache:
        opened = [Cached(source) for source in opened]
    return opened[0] if train else None, opened[-1]


def _opened(data: Data, splits: list[str]) -> list[Source]:
    mode = mode_of(data)
    opened: list[Source]
    if data.name == "digits":
        check_classes(data, 10, "digits")
        opened = [Digits(train=split == data.train_split, mode=mode) for split in splits]
    elif data.name == "shards":
        opened = [Shards(root_of(data), split, mode) for split in splits]
    else:
        opened = [Timm(dataset, mode) for dataset in _timm_sets(data, splits)]
    for split, source in zip(splits, opened, strict=True):
        if not len(source):
            raise UserError(f"data.root: split {split!r} of {data.root} has no images")
    return opened


def _timm_sets(data: Data, splits: list[str]) -> list[Any]:
    """The data sets of these splits, whose classes have the numbers that training gives them."""
    first = _create(data, splits[0])
    classes = _classes(first, splits[0])
    if classes is not None:
        check_classes(data, len(classes), f"split {splits[0]!r} of {data.root}")
    if len(splits) == 1:
        return [first]
    train, val = splits
    unknown = sorted(set(_classes(_create(data, val), val) or ()) - set(classes or ()))
    if unknown:
        raise UserError(
            f"data.root: split {val!r} of {data.root} has classes that {train!r} has not: "
            f"{', '.join(unknown[:5])}"
        )
    return [first, _create(data, val, classes)]


def _create(data: Data, split: str, classes: dict[str, int] | None = None) -> Any:
    from timm.data import add_img_extensions, create_dataset

    prefix, slash, _ = data.name.partition("/")
    if (not slash and data.name != "folder") or prefix in STREAMS:
        reason = "is a stream, which cannot be resumed exactly" if slash else "is none of them"
        raise UserError(
            f"data.name: expected digits, folder, shards, or a name of timm's such as torch/... or "
            f"hfds/...; {data.name!r} {reason}"
        )
    add_img_extensions(FORMATS)
    try:
        if slash:  # its classes are numbers already
            return create_dataset(data.name, root=data.root, split=split)
        place = _place(root_of(data), split)
        # timm would keep the index of a large .tar beside it, as a pickle, and trust what is there;
        # and the .tar open, though neither threads nor processes can share its place in the file.
        kept: dict[str, Any] = {"cache_tarinfo": False, "cache_tarfiles": False}
        return create_dataset(
            "",
            root=str(place),
            search_split=False,
            class_map=classes or {},
            **(kept if place.suffix == ".tar" else {}),
        )
    except (RuntimeError, OSError, ValueError, ImportError) as error:
        where = f"split {split!r} of {data.root or data.name}"
        raise UserError(f"data.root: {where} cannot be read: {error}") from None


def mode_of(data: Data) -> str:
    """Pillow's name for the channels of the images."""
    mode = {1: "L", 3: "RGB"}.get(data.in_chans)
    if mode is None:
        raise UserError(f"data.in_chans: expected 1 or 3, got {data.in_chans}")
    return mode


def root_of(data: Data) -> str:
    if data.root is None:
        raise UserError("data.root: not given; say where the data is, --data PATH")
    if not Path(data.root).is_dir():
        what = "is a file, expected a folder" if Path(data.root).exists() else "is not there"
        raise UserError(f"data.root: {data.root} {what}")
    return data.root


def _place(root: str, split: str) -> Path:
    """The folder of a split, or the .tar of it."""
    for name in split_names(split):
        for place in (Path(root) / name, Path(root) / f"{name}.tar"):
            if place.exists():
                return place
    found = ", ".join(sorted(path.name for path in Path(root).iterdir())[:5])
    raise UserError(
        f"data.root: {root} has no folder or .tar for split {split!r}; found {found or 'nothing'}"
    )


def _classes(dataset: Any, split: str) -> dict[str, int] | None:
    """The classes that the folders of a split name; an error if one of them is empty."""
    reader = getattr(dataset, "reader", None)
    classes = dict(getattr(reader, "class_to_idx", None) or {})
    root = getattr(reader, "root", None)
    if classes and root and Path(root).is_dir():
        folders = {path.name for path in Path(root).iterdir() if path.is_dir()}
        if empty := sorted(folders - set(classes)):
            raise UserError(
                f"data.root: class {empty[0]!r} of split {split!r} has no images in {root}"
            )
    return classes or None


def check_classes(data: Data, found: int, where: str) -> None:
    if found != data.num_classes:
        raise UserError(f"data.num_classes: {where} has {found} classes, got {data.num_classes}")
