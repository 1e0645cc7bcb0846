"""Small real videos, each frame with its number as its grey, and UCF-101's layout of some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from comrope.experiments.data import videos
from comrope.experiments.data.clips import frame_numbers
from comrope.experiments.data.videos import Videos, open_clips

cv2 = pytest.importorskip("cv2")
videos._opencv()  # quiet, before it is used

FRAMES = 40


def write_video(path: Path, frames: int = FRAMES, codec: str = "MJPG", size=(64, 48)) -> Path:
    """Every frame has its number as its grey, 20 + 5 n."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), 25, size)
    assert writer.isOpened()
    for number in range(frames):
        writer.write(np.full((size[1], size[0], 3), 20 + 5 * number, np.uint8))
    writer.release()
    return path


def numbers_of(images: list[np.ndarray]) -> list[int]:
    grey = [image.mean() for image in images]
    numbers = [round((g - 18) / 5) for g in grey]  # codecs make it a little darker
    assert all(abs(20 + 5 * n - g) < 4.5 for n, g in zip(numbers, grey, strict=True)), grey
    return numbers


def source_of(*paths: Path, mode: str = "RGB") -> Videos:
    """These files, without a layout."""
    source = object.__new__(Videos)
    source.mode, source.classes = mode, ["only"]
    source.items = [(path, 0) for path in paths]
    return source


def eight(count: int) -> list[int]:
    return frame_numbers(count, 8)


def copied(ucf: Path, out: Path, videos: str = "videos", splits: str = "splits") -> Path:
    """The same in other places; the videos as links."""
    (out / videos).mkdir(parents=True, exist_ok=True)
    (out / splits).mkdir(parents=True, exist_ok=True)
    for folder in (ucf / "videos").iterdir():
        (out / videos / folder.name).symlink_to(folder)
    for file in (ucf / "splits").iterdir():
        (out / splits / file.name).write_bytes(file.read_bytes())
    return out


def in_folders(ucf: Path, out: Path) -> Path:
    """Class folders in train/ and val/, without lists; one class has no validation video."""
    for split, name, k in (("train", "Emu", 0), ("train", "Ant", 0), ("val", "Emu", 1)):
        (out / split / name).mkdir(parents=True, exist_ok=True)
        (out / split / name / "1.avi").symlink_to(ucf / "videos" / name / f"v_{name}_{k}.avi")
    return out


def open_videos(folder: Path, splits=("train", "validation"), *, name="ucf101", **options):
    """Open the training and the validation split of a data set of two classes."""
    return open_clips(name, str(folder), splits, **{"num_classes": 2, **options})
