"""Sources of images: timm's data sets by name and path, WebDataset shards, scikit-learn digits."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.cache import PixelCache
from comrope.experiments.data.shards import Shards, split_names

__all__ = [
    "CachedImages",
    "Digits",
    "ImageSource",
    "check_classes",
    "open_images",
    "pil_mode",
    "require_root",
]


# In addition to timm's .png, .jpg and .jpeg; timm would silently ignore these.
FORMATS = (".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
STREAMS = ("wds", "hfids", "tfds")
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
        # Use the reader, because the data set would replace an unreadable image by another one.
        image, target, *_ = (self.dataset if self.reader is None else self.reader)[index]
        if not isinstance(image, Image.Image):
            with image:
                return Image.open(image).convert(self.mode), int(target)
        return image.convert(self.mode), int(target)


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
) -> list[ImageSource]:
    """Open splits of a data set and check them.

    Args:
        name: "digits", "folder", "shards", or a name of timm's such as "hfds/...".
        root: The folder of the data set.
        splits: Names of splits. The classes of the second are numbered as in the first.
        train_split: The name of the training split, for digits.
        num_classes: Number of classes that the first split must have.
        mode: Pillow's name of the channels, "RGB" or "L".

    Returns:
        A source for each split.
    """
    opened: list[ImageSource]
    if name == "digits":
        check_classes(DIGIT_CLASSES, num_classes, "digits")
        opened = [Digits(train=split == train_split, mode=mode) for split in splits]
    elif name == "shards":
        folder = require_root(root)
        opened = [Shards(folder, split, mode) for split in splits]
    else:
        opened = [TimmImages(found, mode) for found in _timm_sets(name, root, splits, num_classes)]
    for split, source in zip(splits, opened, strict=True):
        if not len(source):
            raise UserError(f"data.root: split {split!r} of {root} has no images")
    return opened


def _timm_sets(name: str, root: str | None, splits: Sequence[str], num_classes: int) -> list[Any]:
    """Return the data sets of some splits, with the class indices of the first split."""
    first = _create(name, root, splits[0])
    classes = _classes(first, splits[0])
    if classes is not None:
        check_classes(len(classes), num_classes, f"split {splits[0]!r} of {root}")
    if len(splits) == 1:
        return [first]
    train, val = splits
    unknown = sorted(set(_classes(_create(name, root, val), val) or ()) - set(classes or ()))
    if unknown:
        raise UserError(
            f"data.root: split {val!r} of {root} has classes that {train!r} does not have: "
            f"{', '.join(unknown[:5])}"
        )
    return [first, _create(name, root, val, classes)]


def _create(name: str, root: str | None, split: str, classes: dict[str, int] | None = None) -> Any:
    from timm.data import add_img_extensions, create_dataset

    prefix, slash, _ = name.partition("/")
    if (not slash and name != "folder") or prefix in STREAMS:
        reason = "is a stream, which cannot be resumed exactly" if slash else "is unknown"
        raise UserError(
            f"data.name: expected digits, folder, shards, or a name of timm's such as torch/... or "
            f"hfds/...; {name!r} {reason}"
        )
    add_img_extensions(FORMATS)
    try:
        if slash:  # its classes are indices already
            return create_dataset(name, root=root, split=split)
        place = _place(require_root(root), split)
        # timm would store the index of a large .tar next to it as a pickle, and read existing ones.
        # It would also keep the .tar open, whose file position processes cannot share.
        kept: dict[str, Any] = {"cache_tarinfo": False, "cache_tarfiles": False}
        return create_dataset(
            "",
            root=str(place),
            search_split=False,
            class_map=classes or {},
            **(kept if place.suffix == ".tar" else {}),
        )
    except AssertionError as error:  # unknown to timm
        raise UserError(f"data.name: expected a name of timm's, got {name!r} ({error})") from None
    except (RuntimeError, OSError, ValueError, ImportError, tarfile.TarError) as error:
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


def _place(root: str, split: str) -> Path:
    """Return the folder of a split, or its .tar."""
    for name in split_names(split):
        for place in (Path(root) / name, Path(root) / f"{name}.tar"):
            if place.exists():
                return place
    found = ", ".join(sorted(path.name for path in Path(root).iterdir())[:5])
    raise UserError(
        f"data.root: {root} has no folder or .tar for split {split!r}; found {found or 'nothing'}"
    )


def _classes(dataset: Any, split: str) -> dict[str, int] | None:
    """Return the classes of a split's folders with their indices; raise if one has no images."""
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


def check_classes(found: int, expected: int, where: str) -> None:
    """Raise unless a data set has as many classes as ``data.num_classes`` says."""
    if found != expected:
        raise UserError(f"data.num_classes: {where} has {found} classes, got {expected}")
