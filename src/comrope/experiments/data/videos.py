"""Videos: decoded with OpenCV, on demand or once and for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Data
from comrope.experiments.data.clips import Choose, Clips, Moving, Reading, check_count
from comrope.experiments.data.images import check_classes, mode_of, root_of
from comrope.experiments.data.ucf101 import in_folders, in_list, list_folder, training_classes
from comrope.experiments.data.workers import SIDE_BY_SIDE, Kept

__all__ = ["SIDE_BY_SIDE", "CachedVideos", "Videos", "open_clips"]


class Videos(Clips):
    """UCF-101 as it is distributed, and what is laid out like it.

    Class folders in ``root``, ``root/videos`` or ``root/UCF-101``; ``split`` is the name of a list
    in ``root/splits``, ``root/ucfTrainTestlist`` or ``root``, or "train" or "val" for list 01.
    Without lists: class folders in ``root/train`` and ``root/val``, numbered as in ``classes``.
    """

    def __init__(
        self, root: str, split: str, mode: str = "RGB", *, classes: list[str] | None = None
    ) -> None:
        _opencv()  # its absence stops the run here; in ``load`` it would make a video unreadable
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
    """Another source, decoded once and kept in memory that all loading processes share."""

    def __init__(self, source: Clips) -> None:
        self.source, self.classes = source, source.classes
        self.kept = Kept(len(source), self._decode, "videos")

    def _decode(self, index: int) -> tuple[int, list[np.ndarray]]:
        found = self.source.read(index, range)
        return found.said, [found.frames[n] for n in range(found.seen)]

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def target(self, index: int) -> int:
        return self.source.target(index)

    def read(self, index: int, choose: Choose) -> Reading:
        said, seen = self.kept.load(index)
        numbers = choose(said)
        there = {n: self.kept.picture(index, n) for n in numbers if n < seen}
        return Reading(said, numbers, there, seen)


def open_clips(data: Data, *, train: bool = True) -> tuple[Clips | None, Clips]:
    """The training source (None unless asked for) and the validation source, checked."""
    mode = mode_of(data)
    opened: list[Clips] = []
    if data.name == "moving":
        check_classes(data, 2, "moving")
        opened = [Moving(train=part, mode=mode) for part in (True, False)[0 if train else 1 :]]
    elif data.name == "ucf101":
        opened = list(_open_videos(data, mode, train))
    else:
        raise UserError(f"data.name: expected ucf101 or moving, got {data.name!r}")
    if data.cache:
        opened = [CachedVideos(source) for source in opened]
    return opened[0] if train else None, opened[-1]


def _open_videos(data: Data, mode: str, train: bool) -> Sequence[Videos]:
    """Both splits or the second, and nothing that is found wrong only when it is loaded."""
    opened: list[Videos] = []
    for split in (data.train_split, data.val_split)[0 if train else 1 :]:
        root = root_of(data)
        known = opened[0].classes if opened else training_classes(Path(root), data.train_split)
        opened.append(Videos(root, split, mode, classes=known))
        check_classes(data, len(opened[-1].classes), f"split {split!r} of {root}")
        missing = [path for path, _ in opened[-1].items if not path.exists()]
        if missing and data.unreadable == "stop":
            raise UserError(
                f"data.root: split {split!r} has {len(missing)} videos that are not there, such as "
                f"{missing[0]}; data.unreadable=skip would go on without them"
            )
    both = set.intersection(*({path for path, _ in source.items} for source in opened))
    if both and train:
        raise UserError(
            f"data.val_split: {data.val_split} and data.train_split {data.train_split} have "
            f"{len(both)} videos in common, such as {min(both)}"
        )
    return opened


def _opencv() -> Any:
    """OpenCV, quiet and in one thread: others load beside it."""
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
    """A video, and how many frames it says it has."""
    cv2 = _opencv()
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError("not a file" if path.exists() else "no such file")
    if not path.stat().st_size:
        raise ValueError("an empty file")
    str(path).encode()  # OpenCV would not refuse a name that is no text: it would crash
    # FFmpeg and nothing else: another would take digits in the name for a sequence of pictures.
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    try:
        if not capture.isOpened():
            raise ValueError("no video that OpenCV can read")
        yield capture, int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    finally:
        capture.release()


def _decode(path: Path, choose: Choose, mode: str) -> Reading:
    """The chosen frames: every one before the last is decoded, for seeking is not exact."""
    cv2 = _opencv()
    turned = {"RGB": cv2.COLOR_BGR2RGB, "L": cv2.COLOR_BGR2GRAY}[mode]
    with _opened(path) as (capture, said):
        if said < 2:  # some formats do not say
            said = _count(path)
        numbers = choose(said)
        wanted = numbers if isinstance(numbers, range) else set(numbers)
        frames: dict[int, np.ndarray] = {}
        seen = 0
        while seen <= numbers[-1] and capture.grab():
            if seen in wanted:
                there, pixels = capture.retrieve()  # (H, W, 3), blue first
                if not there:
                    raise ValueError(f"frame {seen} cannot be decoded")
                frames[seen] = cv2.cvtColor(pixels, turned)
            seen += 1
    return Reading(said, numbers, frames, seen)


def _count(path: Path) -> int:
    with _opened(path) as (capture, _):
        count = sum(1 for _ in iter(capture.grab, False))
    check_count(count)
    return count
