"""Clips: the frames that are chosen from a video, and generated clips of moving shapes."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from comrope.experiments.common.randomness import derive

__all__ = ["Choose", "Clips", "Moving", "Reading", "check_count", "frame_numbers", "moving_clip"]

MOVING_CLIPS = {"train": 1024, "val": 256}

Choose = Callable[[int], Sequence[int]]  # function from a number of frames to ascending indices


def frame_numbers(
    count: int, frames: int, *, span: float = 1.0, rng: random.Random | None = None
) -> list[int]:
    """Choose the frames of a clip: ascending indices, some of them twice if the video is short.

    A part of the video is divided into ``frames`` equal segments, with one frame from each.

    Args:
        count: Frames of the video.
        frames: Frames of the clip.
        span: Length of the part, as a share of the video.
        rng: Draws the part and the frame of each segment; without it both are the middle ones.
    """
    if min(count, frames) < 1 or not 0 < span <= 1:
        raise ValueError(
            "count, frames, span: expected at least 1, at least 1 and a share in (0, 1], got "
            f"{count}, {frames} and {span}"
        )
    length = max(1, round(span * count))
    if rng is None:
        start = (count - length) // 2
        return [start + (2 * k + 1) * length // (2 * frames) for k in range(frames)]
    start = rng.randrange(count - length + 1)
    edges = [start + k * length // frames for k in range(frames + 1)]
    numbers = [rng.randrange(a, max(a + 1, b)) for a, b in itertools.pairwise(edges)]
    # Edges are rounded down, in half of the draws up, so that no direction of time is preferred.
    return numbers if rng.randrange(2) else [count - 1 - n for n in reversed(numbers)]


class Reading(NamedTuple):
    """The chosen frames of a video that could be read."""

    claimed: int  # frames of the video according to its header, which may be wrong
    numbers: Sequence[int]  # indices of the chosen frames
    frames: dict[int, np.ndarray]  # existing frames by index: (H, W) or (H, W, C), uint8
    seen: int  # existing frames up to the last index


class Clips(ABC):
    """Clips by number."""

    classes: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of clip ``index`` for messages."""

    @abstractmethod
    def target(self, index: int) -> int:
        """Return the class of clip ``index``."""

    @abstractmethod
    def read(self, index: int, choose: Choose) -> Reading:
        """Read the frames chosen by the header's number; raise any error if there are none."""

    def load(self, index: int, choose: Choose) -> tuple[list[np.ndarray], int]:
        """Return the chosen frames and the class; raise any error if they cannot be read.

        If the header is wrong by a few frames, the frames are chosen again among the existing ones.
        """
        found = self.read(index, choose)
        claimed, seen = found.claimed, found.seen
        if found.numbers[-1] >= seen:
            if claimed - seen > max(2, claimed / 10):
                raise ValueError(f"truncated, {seen} of {claimed} frames")
            check_count(seen)
            found = self.read(index, lambda _: choose(seen))
        return [found.frames[n] for n in found.numbers], self.target(index)


class Moving(Clips):
    """Generated shapes that move left or right: only the order of frames shows the direction."""

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
            raise ValueError(f"clips: expected an even number, half per class, got {self.clips}")
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
        frames = {n: np.asarray(Image.fromarray(clip[n]).convert(self.mode)) for n in numbers}
        return Reading(self.frames, numbers, frames, self.frames)


def moving_clip(seed: int, direction: int, frames: int = 16, size: int = 24) -> np.ndarray:
    """Return a shape that moves right (direction 1) or left (-1): (frames, size, size, 3), uint8.

    The two clips of a seed are the reverse of each other, including their noise.
    """
    if direction not in (-1, 1) or frames < 2 or size < 8:
        raise ValueError(
            "direction, frames, size: expected -1 or 1, at least 2 and at least 8, got "
            f"{direction}, {frames} and {size}"
        )
    rng = np.random.default_rng(seed)
    radius = rng.uniform(size / 10, size / 6)
    margin = radius + 0.5  # half a pixel of soft edge
    width = size - 1 - 2 * margin
    travel = rng.uniform(0.25, 0.75) * width
    x = margin + rng.uniform(0, width - travel) + travel * np.linspace(0, 1, frames)
    y = (size - 1) / 2 + rng.uniform(-0.15, 0.15) * size
    dx = np.arange(size) - x[:, None, None]  # (frames, 1, size)
    dy = np.arange(size)[:, None] - y  # (size, 1)
    outside = (  # distance of a pixel from the edge of a square, a disc and a triangle
        np.maximum(abs(dx), abs(dy)) - radius,
        np.hypot(dx, dy) - radius,
        np.maximum(0 * dx + dy, 0.75**0.5 * abs(dx) - 0.5 * dy) - radius / 2,
    )[rng.integers(3)]
    cover = np.clip(0.5 - outside, 0, 1)[..., None]
    colour, noise = rng.uniform(150, 255, 3), rng.uniform(0, 60, (frames, size, size, 3))
    clip = (noise + cover * (colour - noise)).round().astype(np.uint8)
    return clip[::direction]


def check_count(count: int) -> None:
    """Raise unless a video has enough frames for a clip."""
    if count < 2:
        raise ValueError("one frame, expected at least two" if count else "no frames")
