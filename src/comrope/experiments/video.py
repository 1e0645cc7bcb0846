"""Where clips come from: videos in UCF-101's layout, decoded with OpenCV, and moving shapes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from comrope.experiments.config import Data
from comrope.experiments.errors import UserError
from comrope.experiments.randomness import derive
from comrope.experiments.shards import split_names
from comrope.experiments.sources import _check_classes, _root

__all__ = [
    "CachedVideos",
    "Clips",
    "Moving",
    "Videos",
    "frame_numbers",
    "moving_clip",
    "open_clips",
]

FORMATS = (".avi", ".mp4", ".mkv", ".webm", ".mov")
LISTS = dict.fromkeys(("train", "training"), "trainlist01")
LISTS |= dict.fromkeys(("val", "validation", "valid", "test"), "testlist01")
SAMPLE = 32  # videos, spread over all, from which the memory of all is estimated
SHARE = 0.8  # of the memory there is: training wants the rest
MOVING_CLIPS = {"train": 1024, "val": 256}

Choose = Callable[[int], Sequence[int]]  # from a number of frames to ascending frame numbers
Items = list[tuple[Path, int]]  # videos and their classes


def frame_numbers(
    count: int, frames: int, *, span: float = 1.0, rng: random.Random | None = None
) -> list[int]:
    """Which of ``count`` frames make a clip of ``frames``: ascending, some twice if there are few.

    They are taken from a stretch that is ``span`` of the video, its middle one, cut into equal
    segments: the middle frame of each. With ``rng`` it is any stretch and any frame of a segment.
    """
    if min(count, frames) < 1 or not 0 < span <= 1:
        raise ValueError(
            "count, frames, span: expected at least 1, at least 1 and a part of 1, got "
            f"{count}, {frames} and {span}"
        )
    length = max(1, round(span * count))
    if rng is None:
        start = (count - length) // 2
        return [start + (2 * k + 1) * length // (2 * frames) for k in range(frames)]
    start = rng.randrange(count - length + 1)
    edges = [start + k * length // frames for k in range(frames + 1)]
    numbers = [rng.randrange(a, max(a + 1, b)) for a, b in itertools.pairwise(edges)]
    # Edges are rounded down; half of the time up, so that neither direction of time is special.
    return numbers if rng.randrange(2) else [count - 1 - n for n in reversed(numbers)]


class Reading(NamedTuple):
    """What was found of the chosen frames."""

    said: int  # how many frames there are by the header, which may be wrong
    numbers: Sequence[int]
    frames: dict[int, Image.Image]  # those of the numbers that are there
    seen: int  # how many frames there are up to the last of the numbers


class Clips(ABC):
    """Clips by number."""

    classes: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call clip ``index`` when something is wrong with it."""

    @abstractmethod
    def target(self, index: int) -> int:
        """Its class."""

    @abstractmethod
    def read(self, index: int, choose: Choose) -> Reading:
        """The chosen of the frames that it says it has; an error of any kind if it has none."""

    def load(self, index: int, choose: Choose) -> tuple[list[Image.Image], int]:
        """The chosen frames and the class; an error of any kind if they cannot be read.

        A header may be wrong by a few frames. Then the choice is made again, of those there are.
        """
        found = self.read(index, choose)
        said, seen = found.said, found.seen
        if found.numbers[-1] >= seen:
            if said - seen > max(2, said / 10):
                raise ValueError(f"truncated, {seen} of {said} frames")
            _check_count(seen)
            found = self.read(index, lambda _: choose(seen))
        return [found.frames[n] for n in found.numbers], self.target(index)


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
        lists = _list_folder(Path(root))
        if lists is None:
            self.classes, self.items = _in_folders(Path(root), split, classes)
        else:
            self.classes, self.items = _in_list(Path(root), lists, split)

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return str(self.items[index][0])

    def target(self, index: int) -> int:
        return self.items[index][1]

    def read(self, index: int, choose: Choose) -> Reading:
        return _decode(self.items[index][0], choose, self.mode)


class CachedVideos(Clips):
    """Another source, decoded once and kept in memory (before loading processes are forked)."""

    def __init__(self, source: Clips) -> None:
        self.source, self.classes = source, source.classes
        few = range(0, len(source), max(1, len(source) // SAMPLE))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            kept = dict(zip(few, pool.map(self._keep, few), strict=True))
            _check_memory(list(kept.values()), len(source))
            rest = [index for index in range(len(source)) if index not in kept]
            kept |= zip(rest, pool.map(self._keep, rest), strict=True)
        self.items = [kept[index] for index in range(len(source))]

    def _keep(self, index: int) -> tuple[int, list[Any]] | Exception:
        try:
            found = self.source.read(index, range)
            return found.said, [np.asarray(found.frames[n]) for n in range(found.seen)]
        except Exception as error:
            return error.with_traceback(None)  # which would keep what was decoded

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def target(self, index: int) -> int:
        return self.source.target(index)

    def read(self, index: int, choose: Choose) -> Reading:
        item = self.items[index]
        if isinstance(item, Exception):
            raise item.with_traceback(None)
        said, frames = item
        numbers = choose(said)
        there = {n: Image.fromarray(frames[n]) for n in numbers if n < len(frames)}
        return Reading(said, numbers, there, len(frames))


class Moving(Clips):
    """Shapes that move to the left or to the right, made on the fly: only order tells which."""

    def __init__(
        self,
        *,
        train: bool,
        mode: str = "RGB",
        frames_available: int = 16,
        size: int = 24,
        clips: int | None = None,
    ) -> None:
        self.part = "train" if train else "val"
        self.clips = MOVING_CLIPS[self.part] if clips is None else clips
        if self.clips < 2 or self.clips % 2:
            raise ValueError(f"clips: expected an even number, half a class, got {self.clips}")
        self.mode, self.frames, self.size = mode, frames_available, size
        self.classes = ["left", "right"]

    def __len__(self) -> int:
        return self.clips

    def name(self, index: int) -> str:
        return f"moving clip {index} ({self.part})"

    def target(self, index: int) -> int:
        return index % 2

    def read(self, index: int, choose: Choose) -> Reading:
        direction = (-1, 1)[self.target(index)]
        clip = moving_clip(derive("moving", self.part, index), direction, self.frames, self.size)
        numbers = choose(self.frames)
        frames = {n: Image.fromarray(clip[n]).convert(self.mode) for n in numbers}
        return Reading(self.frames, numbers, frames, self.frames)


def moving_clip(seed: int, direction: int, frames: int = 16, size: int = 24) -> np.ndarray:
    """A shape that moves to the right (direction 1) or left (-1): (frames, size, size, 3), uint8.

    The two clips of a seed are each other's reversal, noise and all.
    """
    if direction not in (-1, 1) or frames < 2 or size < 8:
        raise ValueError(
            "direction, frames, size: expected -1 or 1, at least 2 and at least 8, got "
            f"{direction}, {frames} and {size}"
        )
    rng = np.random.default_rng(seed)
    radius = rng.uniform(size / 10, size / 6)
    margin = radius + 0.5  # half a pixel of soft edge
    room = size - 1 - 2 * margin
    travel = rng.uniform(0.25, 0.75) * room
    x = margin + rng.uniform(0, room - travel) + travel * np.linspace(0, 1, frames)
    y = (size - 1) / 2 + rng.uniform(-0.15, 0.15) * size
    dx = np.arange(size) - x[:, None, None]  # (frames, 1, size)
    dy = np.arange(size)[:, None] - y  # (size, 1)
    outside = (  # how far a pixel is from the edge of a square, a disc and a triangle
        np.maximum(abs(dx), abs(dy)) - radius,
        np.hypot(dx, dy) - radius,
        np.maximum(0 * dx + dy, 0.75**0.5 * abs(dx) - 0.5 * dy) - radius / 2,
    )[rng.integers(3)]
    cover = np.clip(0.5 - outside, 0, 1)[..., None]
    colour, noise = rng.uniform(150, 255, 3), rng.uniform(0, 60, (frames, size, size, 3))
    clip = (noise + cover * (colour - noise)).round().astype(np.uint8)
    return clip[::direction]


def open_clips(data: Data, *, train: bool = True) -> tuple[Clips | None, Clips]:
    """The training source (None unless asked for) and the validation source, checked."""
    mode = {1: "L", 3: "RGB"}.get(data.in_chans)
    if mode is None:
        raise UserError(f"data.in_chans: expected 1 or 3, got {data.in_chans}")
    opened: list[Clips] = []
    if data.name == "moving":
        _check_classes(data, 2, "moving")
        opened = [Moving(train=part, mode=mode) for part in (True, False)[0 if train else 1 :]]
    elif data.name == "ucf101":
        for split in (data.train_split, data.val_split)[0 if train else 1 :]:
            known = opened[0].classes if opened else None
            opened.append(Videos(_root(data), split, mode, classes=known))
            _check_classes(data, len(opened[-1].classes), f"split {split!r} of {data.root}")
    else:
        raise UserError(f"data.name: expected ucf101 or moving, got {data.name!r}")
    if data.cache:
        opened = [CachedVideos(source) for source in opened]
    return opened[0] if train else None, opened[-1]


def _list_folder(root: Path) -> Path | None:
    for folder in (root / "splits", root / "ucfTrainTestlist", root):
        if (folder / "classInd.txt").is_file() or any(folder.glob("*list[0-9][0-9].txt")):
            return folder
    return None


def _in_list(root: Path, lists: Path, split: str) -> tuple[list[str], Items]:
    """The classes of classInd.txt, and the videos of a list."""
    numbers = _class_numbers(lists / "classInd.txt")
    places = (root / "videos", root / "UCF-101", root)
    home = next((p for p in places if any((p / name).is_dir() for name in numbers)), None)
    if home is None:
        raise UserError(
            f"data.root: expected folders of classes, such as {next(iter(numbers))}, in "
            f"{' or '.join(map(str, places))}; found none"
        )
    path = lists / f"{split}.txt"
    items = []
    for where, line in _lines(path if path.is_file() else lists / f"{LISTS.get(split, split)}.txt"):
        video, _, number = line.rpartition(" ")
        if not number.isdecimal():
            video, number = line, ""
        name = PurePosixPath(video.strip().replace("\\", "/"))
        if name.is_absolute() or PureWindowsPath(str(name)).drive or ".." in name.parts:
            raise UserError(f"{where}: expected a path inside the data set, got {line!r}")
        if len(name.parts) < 2 or name.parts[0] not in numbers:
            raise UserError(
                f"{where}: expected CLASS/VIDEO of a class in classInd.txt, got {line!r}"
            )
        expected = numbers[name.parts[0]]
        if number and int(number) != expected:
            raise UserError(
                f"{where}: expected {expected}, the number that {name.parts[0]} has in "
                f"classInd.txt, got {number}"
            )
        items.append((home / name, expected - 1))
    return list(numbers), items


def _class_numbers(path: Path) -> dict[str, int]:
    """Classes and their numbers, in the order of these."""
    found: dict[int, str] = {}
    for where, line in _lines(path):
        number, _, name = line.partition(" ")
        if not re.fullmatch("[0-9]+", number) or not name:
            raise UserError(f"{where}: expected a number and a class, got {line!r}")
        if int(number) in found or name.strip() in found.values():
            raise UserError(f"{where}: expected every number and class once, got {line!r} besides")
        found[int(number)] = name.strip()
    if max(found) != len(found) or min(found) != 1:
        raise UserError(
            f"{path}: expected numbers from 1 to {len(found)}, got {min(found)} to {max(found)}"
        )
    return {found[number]: number for number in sorted(found)}


def _lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a list that are not blank, each behind the place to name if it is wrong."""
    if not path.is_file():
        others = ", ".join(sorted(file.name for file in path.parent.glob("*.txt"))[:8])
        raise UserError(f"data.root: {path} is not there; found {others or 'no lists'}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    lines = enumerate(text.replace("\t", " ").split("\n"), 1)
    found = [(f"{path}, line {number}", line.strip()) for number, line in lines if line.strip()]
    if not found:
        raise UserError(f"{path}: expected at least one line, got none")
    return found


def _in_folders(root: Path, split: str, classes: list[str] | None) -> tuple[list[str], Items]:
    """The classes that the folders of a split name, and the videos in them."""
    place = next((root / n for n in split_names(split) if (root / n).is_dir()), None)
    if place is None:
        found = ", ".join(sorted(path.name for path in root.iterdir())[:5])
        raise UserError(
            f"data.root: {root} has neither lists such as splits/classInd.txt nor a folder for "
            f"split {split!r}; found {found or 'nothing'}"
        )
    folders = sorted(path for path in place.iterdir() if path.is_dir() and path.name[0] != ".")
    known = [folder.name for folder in folders] if classes is None else classes
    if unknown := [folder.name for folder in folders if folder.name not in known]:
        raise UserError(
            f"data.root: split {split!r} of {root} has classes that training has not: "
            f"{', '.join(unknown[:5])}"
        )
    items: Items = []
    for folder in folders:
        # Not those that begin with a dot: macOS leaves such beside the files that it copies.
        files = [p for p in folder.iterdir() if p.suffix.lower() in FORMATS and p.name[0] != "."]
        if not files:
            raise UserError(f"data.root: class {folder.name!r} of split {split!r} has no videos")
        items += [(path, known.index(folder.name)) for path in sorted(files)]
    if not items:
        raise UserError(f"data.root: expected a folder for every class in {place}, found none")
    return known, items


def _opencv() -> Any:
    """OpenCV, quiet and in one thread: loading processes are forked, its threads are not."""
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
    with _opened(path) as (capture, said):
        if said < 2:  # some formats do not say
            said = _count(path)
        numbers = choose(said)
        wanted = numbers if isinstance(numbers, range) else set(numbers)
        frames: dict[int, Image.Image] = {}
        seen = 0
        while seen <= numbers[-1] and capture.grab():
            if seen in wanted:
                there, pixels = capture.retrieve()  # (H, W, 3), blue first
                if not there:
                    raise ValueError(f"frame {seen} cannot be decoded")
                size = pixels.shape[1], pixels.shape[0]
                image = Image.frombuffer("RGB", size, pixels, "raw", "BGR", 0, 1)
                frames[seen] = image.convert(mode)
            seen += 1
    return Reading(said, numbers, frames, seen)


def _count(path: Path) -> int:
    with _opened(path) as (capture, _):
        count = sum(1 for _ in iter(capture.grab, False))
    _check_count(count)
    return count


def _check_count(count: int) -> None:
    if count < 2:
        raise ValueError("one frame is no clip" if count else "no frames")


def _check_memory(kept: list[Any], videos: int) -> None:
    """Raise unless there is room for all videos, if they are like those that are kept."""
    items = [item for item in kept if not isinstance(item, Exception)]
    each = sum(frame.nbytes for _, frames in items for frame in frames) / max(1, len(items))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # every one keeps all
    needed, there = each * videos * processes, _memory()
    if needed > SHARE * there:
        raise UserError(
            f"data.cache: {videos} videos would need about {needed / 2**30:.1f} GiB of memory, "
            f"expected at most {SHARE:.0%} of the {there / 2**30:.1f} GiB there are; "
            "data.cache=false would decode them on demand"
        )


def _memory() -> int:
    """The bytes that are available; of a container no more than it is allowed."""
    import psutil  # type: ignore[import-untyped]

    there = int(psutil.virtual_memory().available)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            there = min(there, int(Path("/sys/fs/cgroup", limit).read_text()))
    return there
