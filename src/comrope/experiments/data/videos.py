"""Videos, decoded with OpenCV on demand, or once into memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.cache import PixelCache
from comrope.experiments.data.clips import Choose, Clips, Moving, Reading, check_count
from comrope.experiments.data.files import file_size
from comrope.experiments.data.images import check_classes, require_root
from comrope.experiments.data.ucf101 import in_folders, in_list, list_folder, training_classes

__all__ = ["CachedVideos", "Videos", "open_clips"]

MOVING_CLASSES = 2


class Videos(Clips):
    """UCF-101 in its original layout, and data sets with the same layout.

    Class folders are in ``root``, ``root/videos`` or ``root/UCF-101``. ``split`` is the name of a
    list in ``root/splits``, ``root/ucfTrainTestlist`` or ``root``; "train" and "val" mean list 01.
    Without lists, class folders are in ``root/train`` and ``root/val``, indexed as in ``classes``.
    """

    def __init__(
        self, root: str, split: str, mode: str = "RGB", *, classes: list[str] | None = None
    ) -> None:
        _opencv()  # raise here without OpenCV; in ``load`` every video would count as unreadable
        self.mode = mode
        lists = list_folder(Path(root))
        if lists is None:
            self.classes, self.items = in_folders(Path(root), split, classes)
        else:
            self.classes, self.items = in_list(Path(root), lists, split)

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return str(self.items[index][0])

    def target(self, index: int) -> int:
        return self.items[index][1]

    def read(self, index: int, choose: Choose) -> Reading:
        return _decode(self.items[index][0], choose, self.mode)


class CachedVideos(Clips):
    """Another source, decoded once into memory that all loading processes share."""

    def __init__(self, source: Clips) -> None:
        self.source, self.classes = source, source.classes
        self.cache = PixelCache(len(source), self._decode, "videos")

    def _decode(self, index: int) -> tuple[int, list[np.ndarray]]:
        found = self.source.read(index, range)
        return found.claimed, [found.frames[n] for n in range(found.seen)]

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def target(self, index: int) -> int:
        return self.source.target(index)

    def read(self, index: int, choose: Choose) -> Reading:
        claimed, seen = self.cache.load(index)
        numbers = choose(claimed)
        frames = {n: self.cache.picture(index, n) for n in numbers if n < seen}
        return Reading(claimed, numbers, frames, seen)


def open_clips(
    name: str,
    root: str | None,
    splits: tuple[str, str],
    *,
    num_classes: int,
    mode: str = "RGB",
    skip: bool = False,
    train: bool = True,
) -> list[Clips]:
    """Open the training and the validation split, or only the latter, and check them.

    Args:
        name: "ucf101" or "moving".
        root: The folder of the data set.
        splits: The names of the two splits.
        num_classes: Number of classes that each split must have.
        mode: Pillow's name of the channels, "RGB" or "L".
        skip: Whether missing videos are skipped.
        train: Whether both splits are opened.
    """
    if name == "moving":
        check_classes(MOVING_CLASSES, num_classes, "moving")
        return [Moving(train=part, mode=mode) for part in (True, False)[0 if train else 1 :]]
    if name != "ucf101":
        raise UserError(f"data.name: expected ucf101 or moving, got {name!r}")
    opened: list[Videos] = []
    for split in splits[0 if train else 1 :]:
        folder = require_root(root)
        classes = opened[0].classes if opened else training_classes(Path(folder), splits[0])
        opened.append(Videos(folder, split, mode, classes=classes))
        check_classes(len(opened[-1].classes), num_classes, f"split {split!r} of {folder}")
        missing = [path for path, _ in opened[-1].items if not path.exists()]
        if missing and not skip:
            raise UserError(
                f"data.root: split {split!r} has {len(missing)} videos that do not exist, such as "
                f"{missing[0]}; data.unreadable=skip continues without them"
            )
    both = set.intersection(*({path for path, _ in source.items} for source in opened))
    if both and train:
        raise UserError(
            f"data.val_split: {splits[1]} and data.train_split {splits[0]} have "
            f"{len(both)} videos in common, such as {min(both)}"
        )
    return list(opened)


def _opencv() -> Any:
    """Return OpenCV, without messages and with one thread, because every process decodes."""
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    try:
        import cv2
    except ImportError as error:
        raise UserError(
            f'data.name: videos need OpenCV, pip install "comrope[video]" ({error})'
        ) from None
    cv2.setNumThreads(1)
    return cv2


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a video; yield it and the number of frames in its header."""
    cv2 = _opencv()
    if not file_size(path):
        raise ValueError("an empty file")
    str(path).encode()  # OpenCV crashes on a name that is not UTF-8
    # FFmpeg only: other readers interpret digits in the name as a sequence of pictures.
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    try:
        if not capture.isOpened():
            raise ValueError("OpenCV cannot read this format")
        yield capture, int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    finally:
        capture.release()


def _decode(path: Path, choose: Choose, mode: str) -> Reading:
    """Read the chosen frames; all frames before the last are read, since seeking is not exact."""
    cv2 = _opencv()
    conversion = {"RGB": cv2.COLOR_BGR2RGB, "L": cv2.COLOR_BGR2GRAY}[mode]
    with _opened(path) as (capture, claimed):
        if claimed < 2:  # the headers of some formats do not contain it
            claimed = _count(path)
        numbers = choose(claimed)
        wanted = numbers if isinstance(numbers, range) else set(numbers)
        frames: dict[int, np.ndarray] = {}
        seen = 0
        while seen <= numbers[-1] and capture.grab():
            if seen in wanted:
                decoded, pixels = capture.retrieve()  # (H, W, 3), blue first
                if not decoded:
                    raise ValueError(f"frame {seen} cannot be decoded")
                frames[seen] = cv2.cvtColor(pixels, conversion)
            seen += 1
    return Reading(claimed, numbers, frames, seen)


def _count(path: Path) -> int:
    with _opened(path) as (capture, _):
        count = sum(1 for _ in iter(capture.grab, False))
    check_count(count)
    return count
