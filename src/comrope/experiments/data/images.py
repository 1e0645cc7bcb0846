"""Sources of images: folders, tars, shards, timm's data sets by name, scikit-learn digits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.cache import PixelCache
from comrope.experiments.data.files import check_links
from comrope.experiments.data.folders import FolderImages, find_split
from comrope.experiments.data.pictures import convert, decode
from comrope.experiments.data.shards import Shards

__all__ = [
    "CachedImages",
    "Digits",
    "ImageSource",
    "check_classes",
    "open_images",
    "pil_mode",
    "require_root",
]


OF_TIMM, STREAMS = ("hfds", "torch"), ("wds", "hfids", "tfds")
LISTED = ("torch/folder", "torch/image_folder", "torch/imagenet")  # torchvision lists folders
DIGIT_CLASSES = 10


class ImageSource(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the name of image ``index`` for messages."""

    def load(self, index: int) -> tuple[Image.Image, int]:
        """Return the decoded image and its class; raise any error if it cannot be read."""


class Digits:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8; every fifth is for validation."""

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


class TimmImages:
    """A data set of timm's factory: of torchvision or Hugging Face.

    Args:
        dataset: The data set.
        mode: Pillow's name of the channels, "RGB" or "L".
        exif: Whether the orientation in EXIF data is applied.
    """

    def __init__(self, dataset: Any, mode: str, *, exif: bool = False) -> None:
        self.dataset, self.mode, self.exif = dataset, mode, exif
        self.reader = getattr(dataset, "reader", None)
        if hasattr(dataset, "loader"):  # torchvision's own decodes any format
            dataset.loader = functools.partial(decode, mode=mode, exif=exif)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        with contextlib.suppress(AttributeError, IndexError, TypeError):
            return str(self.dataset.samples[index][0])  # of torchvision's folders
        try:
            return str(self.reader.filename(index, absolute=True))  # type: ignore[union-attr]
        except (AttributeError, NotImplementedError, AssertionError, TypeError, KeyError):
            return f"image {index}"

    def load(self, index: int) -> tuple[Image.Image, int]:
        # Use the reader, because the data set would replace an unreadable image by another one.
        image, target, *_ = (self.dataset if self.reader is None else self.reader)[index]
        if isinstance(image, Image.Image):
            return convert(image, self.mode, exif=self.exif), int(target)
        with image:
            return decode(image, self.mode, exif=self.exif), int(target)


class CachedImages:
    """Another source, decoded once into memory that all loading processes share."""

    def __init__(self, source: ImageSource) -> None:
        self.source = source
        self.cache = PixelCache(len(source), self._decode, "images")

    def _decode(self, index: int) -> tuple[int, list[Image.Image]]:
        image, target = self.source.load(index)
        return target, [image]

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def load(self, index: int) -> tuple[Image.Image, int]:
        target, _ = self.cache.load(index)
        return Image.fromarray(self.cache.picture(index)), target


def open_images(
    name: str,
    root: str | None,
    splits: Sequence[str],
    *,
    train_split: str,
    num_classes: int,
    mode: str = "RGB",
    exif: bool = False,
) -> list[ImageSource]:
    """Open splits of a data set and check them.

    Args:
        name: "digits", "folder", "shards", or a name of timm's such as "hfds/...".
        root: The folder of the data set.
        splits: Names of splits. The classes of the second are numbered as in the first.
        train_split: The name of the training split, for digits.
        num_classes: Number of classes that the first split must have.
        mode: Pillow's name of the channels, "RGB" or "L".
        exif: Whether the orientation in EXIF data is applied.

    Returns:
        A source for each split.
    """
    opened: list[ImageSource]
    if name == "digits":
        check_classes(DIGIT_CLASSES, num_classes, "digits")
        opened = [Digits(train=split == train_split, mode=mode) for split in splits]
    elif name == "shards":
        folder = require_root(root)
        opened = [Shards(folder, split, mode, exif=exif) for split in splits]
    elif name == "folder":
        opened = [*_open_folders(require_root(root), splits, num_classes, mode, exif)]
    else:
        found = _timm_sets(name, root, splits, num_classes)
        opened = [TimmImages(dataset, mode, exif=exif) for dataset in found]
    for split, source in zip(splits, opened, strict=True):
        if not len(source):
            raise UserError(f"data.root: split {split!r} of {root} has no images")
    return opened


def _open_folders(
    root: str, splits: Sequence[str], num_classes: int, mode: str, exif: bool
) -> list[FolderImages]:
    first, *others = (FolderImages(find_split(root, s), mode, exif=exif) for s in splits)
    check_classes(len(first.classes), num_classes, f"split {splits[0]!r} of {root}")
    for split, other in zip(splits[1:], others, strict=True):
        _check_known(other.classes, first.classes, splits[0], split, root)
        other.number_as(first.classes)
    return [first, *others]


def _timm_sets(name: str, root: str | None, splits: Sequence[str], num_classes: int) -> list[Any]:
    """Return the data sets of some splits, whose classes are numbers already."""
    opened = [_create(name, root, split) for split in splits]
    classes = [getattr(getattr(one, "reader", None), "class_to_idx", None) for one in opened]
    if classes[0]:
        check_classes(len(classes[0]), num_classes, f"split {splits[0]!r} of {root}")
    for split, found in zip(splits[1:], classes[1:], strict=True):
        _check_known(found or (), classes[0] or (), splits[0], split, root)
    return opened


def _check_known(
    found: Iterable[str], known: Iterable[str], first: str, split: str, root: str | None
) -> None:
    if unknown := sorted({*found} - {*known}):
        raise UserError(
            f"data.root: split {split!r} of {root} has classes that {first!r} does not have: "
            f"{', '.join(unknown[:5])}"
        )


def _create(name: str, root: str | None, split: str) -> Any:
    from timm.data import create_dataset

    prefix, slash, _ = name.partition("/")
    if not slash or prefix not in OF_TIMM:
        stream = slash and prefix in STREAMS
        reason = "is a stream, which cannot be resumed exactly" if stream else "is unknown"
        raise UserError(
            f"data.name: expected digits, folder, shards, or a name of timm's such as torch/... or "
            f"hfds/...; {name!r} {reason}"
        )
    if root and name.lower() in LISTED and Path(root).is_dir():
        check_links(root)  # torchvision would follow them as often as the system allows
    try:
        return create_dataset(name, root=root, split=split)
    except AssertionError as error:  # unknown to timm
        raise UserError(f"data.name: expected a name of timm's, got {name!r} ({error})") from None
    except Exception as error:  # of timm, torchvision or datasets
        raise UserError(
            f"data.root: split {split!r} of {root or name} cannot be read: {error}"
        ) from None


def pil_mode(channels: int) -> str:
    """Return Pillow's mode for a number of channels."""
    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise UserError(f"data.in_chans: expected 1 or 3, got {channels}")
    return mode


def require_root(root: str | None) -> str:
    """Return ``data.root``; raise unless it is an existing folder."""
    if root is None:
        raise UserError("data.root: not given; pass the folder of the data set, --data PATH")
    if not Path(root).is_dir():
        what = "is a file, expected a folder" if Path(root).exists() else "does not exist"
        raise UserError(f"data.root: {root} {what}")
    return root


def check_classes(found: int, expected: int, where: str) -> None:
    """Raise unless a data set has as many classes as ``data.num_classes`` says."""
    if found != expected:
        raise UserError(f"data.num_classes: {where} has {found} classes, got {expected}")
