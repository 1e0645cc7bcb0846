"""Images and clips with augmentation, by ``Key``; items contain the names of unreadable files."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from comrope.experiments.common.randomness import derive, seeded
from comrope.experiments.data.batches import IGNORED, Batch, Key
from comrope.experiments.data.clips import frame_numbers
from comrope.experiments.data.transforms import whole_clip

__all__ = ["ClipDataset", "ImageDataset", "Item", "collate_images"]

MAX_UNREADABLE = 50  # images in a row
MAX_DRAWS = 10  # of an augmentation


class Item(NamedTuple):
    """One image or clip, ready for a batch."""

    image: Tensor  # (C, H, W) or (C, T, H, W), uint8
    target: int
    unreadable: list[str]
    fatal: str | None = None


class ImageDataset(Dataset[Item]):
    """A source with augmentation, which is drawn for each key.

    Args:
        source: An ``ImageSource``.
        transform: Function from an image to bytes (C, H, W).
        seed: Determines the draws, together with the key.
        num_classes: Targets are 0 to ``num_classes - 1``.
        channels: 1 (grey) or 3, of padding images.
        skip: Whether unreadable images are skipped; otherwise the first one stops the run.
        training: Whether the next image replaces a skipped one; in evaluation none does.
        draws_from_numpy: Whether the transform draws from NumPy, as timm's auto-augment does.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Any], Any],
        *,
        seed: int,
        num_classes: int,
        channels: int = 3,
        skip: bool = False,
        training: bool = False,
        draws_from_numpy: bool = False,
    ) -> None:
        self.source, self.transform = source, transform
        self.seed, self.num_classes, self.skip = seed, num_classes, skip
        self.attempts = MAX_UNREADABLE if training else 1
        self.blank: Any = Image.new("L" if channels == 1 else "RGB", (8, 8))
        # Saving NumPy's state takes longer than cropping an image.
        self.draws_from_numpy = draws_from_numpy

    def __getitem__(self, key: Key) -> Item:
        unreadable: list[str] = []
        image, target, fatal = self.blank, IGNORED, None
        for attempt in range(self.attempts if key.place >= 0 else 0):
            index = (key.sample + attempt) % len(self.source)
            try:
                loaded, label = self.load(index, key)
                if not 0 <= label < self.num_classes:
                    raise ValueError(f"class {label}, expected less than {self.num_classes}")
                image, target = loaded, label
                break
            except Exception as error:
                unreadable.append(self.source.name(index))
                if not self.skip:
                    fatal = (
                        f"{unreadable[0]}: cannot be read ({error}); "
                        "data.unreadable=skip continues without it"
                    )
                    break
                if attempt == MAX_UNREADABLE - 1:
                    fatal = f"{unreadable[0]} and the {attempt} images after it cannot be read"
        return Item(self.augment(image, key), target, unreadable, fatal)

    def load(self, index: int, key: Key) -> tuple[Any, int]:
        """Return the item of the source at an index, and its class."""
        found: tuple[Any, int] = self.source.load(index)
        return found

    def augment(self, image: Any, key: Key) -> Any:
        """Return the image as bytes (C, H, W), augmented by the draw of a key."""
        return self.draw(self.transform, image, key)

    def draw(self, transform: Callable[[Any], Any], image: Any, key: Key) -> Tensor:
        """Apply a transform with the random numbers of a key.

        timm's posterize sometimes draws zero bits, which Pillow refuses. Then draw again.
        """
        for attempt in range(MAX_DRAWS):
            with seeded(
                self.seed, "image", key.epoch, key.place, attempt, numpy=self.draws_from_numpy
            ):
                try:
                    return torch.as_tensor(transform(image))
                except ValueError:
                    if attempt == MAX_DRAWS - 1:
                        raise
        raise AssertionError


class ClipDataset(ImageDataset):
    """Clips of videos. One draw augments all frames of a clip.

    Args:
        source: ``Clips``.
        transform: Function from an image to bytes (C, H, W).
        frames: Frames of a clip.
        span: The share of a video that a clip covers, 0 to 1.
        backwards: Whether frames are ordered from the last to the first.
        random_frames: Whether frames are drawn; otherwise they have equal distances.
        options: Options of ``ImageDataset``.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Any], Any],
        *,
        frames: int,
        span: float = 1.0,
        backwards: bool = False,
        random_frames: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(source, transform, **options)
        self.blank = [np.asarray(self.blank)] * frames
        self.frames, self.span, self.backwards = frames, span, backwards
        self.random_frames, self.whole = random_frames, whole_clip(transform)

    def load(self, index: int, key: Key) -> tuple[Any, int]:
        own = derive(self.seed, "frames", key.epoch, key.place)
        rng = random.Random(own) if self.random_frames else None

        def choose(count: int) -> list[int]:
            return frame_numbers(count, self.frames, span=self.span, rng=rng)

        frames, target = self.source.load(index, choose)
        return frames[::-1] if self.backwards else frames, target

    def augment(self, image: Sequence[np.ndarray], key: Key) -> Tensor:
        """Return the frames as bytes (C, T, H, W)."""
        if self.whole is not None and len({frame.shape for frame in image}) == 1:
            return self.draw(self.whole, image, key)
        frames = [self.draw(self.transform, Image.fromarray(frame), key) for frame in image]
        return torch.stack([frame.movedim(0, -1) for frame in frames]).movedim(-1, 0)


def collate_images(items: list[Item]) -> Batch:
    """Return a batch of images (B, C, H, W) or clips (B, C, T, H, W)."""
    images, targets, unreadable, fatal = zip(*items, strict=True)
    names = [name for some in unreadable for name in some]
    # Channels last in memory, as in decoded images; reordering on the device costs no extra pass.
    # default_collate writes to memory that the training process reads without a copy.
    pixels = default_collate([image.movedim(0, -1) for image in images]).movedim(-1, 1)
    return Batch(pixels, torch.tensor(targets), names, next(filter(None, fatal), None))
