"""Batches: which images or clips, in which order, augmented how. A function of seed, epoch and step
alone.

The order of an epoch is drawn for the whole training run, and every process takes its slice of
every batch: the same images meet in a step, augmented in the same way, whatever the number of
processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import derive, generator, seeded
from comrope.experiments.config import Config
from comrope.experiments.data.clips import Clips, frame_numbers
from comrope.experiments.data.images import Source
from comrope.experiments.data.transforms import evaluation_transform, training_transform, whole_clip
from comrope.experiments.data.workers import create_loader, end, start
from comrope.experiments.tasks.views import View, usual_view

__all__ = ["Batch", "Normalize", "TrainBatches", "Validation", "train_loader"]

RETRIES = 50  # unreadable images in a row
DRAWS = 10  # of an augmentation
IGNORED = -1  # the class of what only fills a batch


class Key(NamedTuple):
    """One image of one epoch.

    ``place`` in the epoch tells repeated augmentations of one image apart; -1 only fills a batch.
    """

    epoch: int
    place: int
    image: int
    view: View | None = None  # None for that of training


class Batch(NamedTuple):
    images: Tensor  # (B, C, H, W), uint8; of clips (B, C, T, H, W); in memory the channels are last
    targets: Tensor  # (B,)
    unreadable: list[str]  # names of images that were skipped
    fatal: str | None  # why the run must stop: raised by whoever gets it, not in a loading process

    def pin_memory(self) -> Batch:
        return self._replace(images=self.images.pin_memory(), targets=self.targets.pin_memory())


class Item(NamedTuple):
    image: Tensor
    target: int
    unreadable: list[str]
    fatal: str | None = None


class Images(Dataset[Item]):
    """A source behind its augmentation, which is drawn for each key anew."""

    def __init__(self, source: Source, transform: Any, config: Config, *, take_next: bool) -> None:
        self.source, self.transform = source, transform
        self.seed, self.skip = config.train.seed, config.data.unreadable == "skip"
        self.classes = config.data.num_classes
        # In training the next image takes the place of one that was skipped, in evaluation none.
        self.retries = RETRIES if take_next else 1
        self.blank = Image.new("L" if config.data.in_chans == 1 else "RGB", (8, 8))
        # Only that draws from NumPy, whose state takes longer to save than to cut out an image.
        self.numpy = config.augment.auto_augment is not None

    def __getitem__(self, key: Key) -> Item:
        unreadable: list[str] = []
        image, target, fatal = self.blank, IGNORED, None
        for attempt in range(self.retries if key.place >= 0 else 0):
            index = (key.image + attempt) % len(self.source)
            try:
                image, target = self._load(index, key)
                if not 0 <= target < self.classes:
                    raise ValueError(f"class {target}, expected less than {self.classes}")
                break
            except Exception as error:
                unreadable.append(self.source.name(index))
                if not self.skip:
                    fatal = (
                        f"{unreadable[0]}: cannot be read ({error}); "
                        "data.unreadable=skip would go on without it"
                    )
                    break
                if attempt == RETRIES - 1:
                    fatal = f"{unreadable[0]} and the {attempt} images after it cannot be read"
        return Item(self._augmented(image, key), target, unreadable, fatal)

    def _load(self, index: int, key: Key) -> tuple[Any, int]:
        return self.source.load(index)

    def _augmented(self, image: Any, key: Key) -> Tensor:
        return self._drawn(self.transform, image, key)

    def _drawn(self, transform: Any, image: Any, key: Key) -> Tensor:
        """A draw of the augmentation; another one if it is none that Pillow will do.

        timm's posterize asks for zero bits at times, which Pillow refuses.
        """
        for attempt in range(DRAWS):
            with seeded(self.seed, "image", key.epoch, key.place, attempt, numpy=self.numpy):
                try:
                    return torch.as_tensor(transform(image))
                except ValueError:
                    if attempt == DRAWS - 1:
                        raise
        raise AssertionError


class Cuts(Images):
    """Videos cut into clips. All frames of one are augmented by the same draw."""

    def __init__(
        self, source: Clips, transform: Any, config: Config, view: View, *, take_next: bool
    ) -> None:
        super().__init__(source, transform, config, take_next=take_next)  # type: ignore[arg-type]
        self.blank = [np.asarray(self.blank)] * view.frames  # type: ignore[assignment]
        self.view, self.whole = view, whole_clip(transform)
        self.random = take_next and config.augment.frames == "random"

    def _load(self, index: int, key: Key) -> tuple[Any, int]:
        own = derive(self.seed, "frames", key.epoch, key.place)
        rng = random.Random(own) if self.random else None

        def choose(count: int) -> list[int]:
            return frame_numbers(count, self.view.frames, span=self.view.span, rng=rng)

        return self.source.load(index, choose)  # type: ignore[call-arg]

    def _augmented(self, image: Any, key: Key) -> Tensor:
        if self.whole is not None and len({frame.shape for frame in image}) == 1:
            return self._drawn(self.whole, image, key)
        frames = [self._drawn(self.transform, Image.fromarray(frame), key) for frame in image]
        return torch.stack([frame.movedim(0, -1) for frame in frames]).movedim(-1, 0)


class TrainBatches:
    """A batch sampler: the keys of this process, step after step, from ``start`` on."""

    def __init__(
        self, config: Config, size: int, *, rank: int = 0, world: int = 1, start: int = 0
    ) -> None:
        train = config.train
        self.seed, self.size, self.repeats = train.seed, size, config.augment.repeats
        self.batch, self.parts = train.batch_size, train.accumulate
        self.rank, self.world = rank, world
        self.steps_per_epoch = size // train.batch_size
        self.steps = self.steps_per_epoch * train.epochs
        self.start = start
        if not self.steps_per_epoch:
            raise UserError(
                f"train.batch_size: expected at most {size}, the images there are, got {self.batch}"
            )
        if self.batch % (world * self.parts):
            raise UserError(
                f"train.batch_size: expected a multiple of {world} processes x train.accumulate "
                f"{self.parts}, got {self.batch}"
            )

    def order(self, epoch: int) -> Tensor:
        """All images of an epoch; with ``repeats`` r, a 1/r of them r times each."""
        order = torch.randperm(self.size, generator=generator(self.seed, "order", epoch))
        return order.repeat_interleave(self.repeats)[: self.size]

    def __len__(self) -> int:
        return (self.steps - self.start) * self.parts

    def __iter__(self) -> Iterator[list[Key]]:
        share = self.batch // (self.world * self.parts)
        epoch = -1
        for step in range(self.start, self.steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.order(epoch).tolist()
            first = (step % self.steps_per_epoch) * self.batch
            for part in range(self.parts):
                begin = first + (self.rank * self.parts + part) * share
                yield [Key(epoch, place, order[place]) for place in range(begin, begin + share)]


def train_loader(config: Config, source: Source, batches: TrainBatches) -> DataLoader[Any]:
    """All batches to the last of this run, ``train.accumulate`` a step."""
    if config.detects:
        from comrope.experiments.data.boxes import BoxedImages

        return _loader(config, BoxedImages(source, config, train=True), batches)
    transform = training_transform(config)
    images = _behind(source, transform, config, usual_view(config), take_next=True)
    return _loader(config, images, batches)


class Views(Dataset[Item]):
    """The validation set in any view: a key says in which."""

    def __init__(self, config: Config, source: Source) -> None:
        self.config, self.source = config, source
        self.images: dict[View, Images] = {}

    def __getitem__(self, key: Key) -> Item:
        view = key.view or usual_view(self.config)
        if view not in self.images:
            self.images[view] = self._in(view)
        return self.images[view][key]

    def _in(self, view: View) -> Images:
        if self.config.detects:
            from comrope.experiments.data.boxes import BoxedImages

            return BoxedImages(self.source, self.config, train=False)
        transform = evaluation_transform(self.config, view)
        return _behind(self.source, transform, self.config, view, take_next=False)


class Validation:
    """The validation set, in any view, from one set of loading processes: they stay until it is
    closed."""

    def __init__(self, config: Config, source: Source, *, rank: int = 0, world: int = 1) -> None:
        self.config, self.source, self.rank, self.world = config, source, rank, world
        self.keys: list[list[Key]] = []
        self.loader = _loader(config, Views(config, source), self.keys, persistent=True)
        self.started: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, view: View) -> Iterator[Batch]:
        """All images, in order; every process gets as many batches. What is left of an earlier view
        is given up."""
        self.keys[:] = self._keys(view)
        self.started = start(self.loader)
        return self.started

    def close(self) -> None:
        end(self.started)
        self.loader._iterator = None  # or it would be used again

    def _keys(self, view: View) -> list[list[Key]]:
        images, batch, world = len(self.source), self.config.evaluate.batch_size, self.world
        share = int(batch * _pixels(usual_view(self.config)) / _pixels(view) / world)
        share = max(1, min(share, batch // world, -(-images // world)))
        count = -(-images // (share * world))
        return [
            [
                Key(0, place if place < images else -1, min(place, images - 1), view)
                for place in range(
                    (b * world + self.rank) * share, (b * world + self.rank + 1) * share
                )
            ]
            for b in range(count)
        ]


def _behind(source: Any, transform: Any, config: Config, view: View, *, take_next: bool) -> Images:
    if view.frames:
        return Cuts(source, transform, config, view, take_next=take_next)
    return Images(source, transform, config, take_next=take_next)


def _pixels(view: View) -> int:
    return view.resolution**2 * max(1, view.frames)


class Normalize:
    """Bytes (B, C, ...) to the device, and to zero mean and unit spread."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.device = device
        axes = 3 if config.data.frames else 2
        self.mean, self.std = (
            255 * torch.tensor(values, device=device).view(1, -1, *[1] * axes)
            for values in (config.data.mean, config.data.std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        return (images - self.mean) / self.std


def _collate(items: list[Item]) -> Batch:
    images, targets, unreadable, fatal = zip(*items, strict=True)
    names = [name for some in unreadable for name in some]
    # As pixels come, with their channels side by side in memory: to turn them round is nothing to a
    # device. torch's own puts them where the training process can read them, without a copy.
    pixels = default_collate([image.movedim(0, -1) for image in images]).movedim(-1, 1)
    return Batch(pixels, torch.tensor(targets), names, next(filter(None, fatal), None))


def _loader(config: Config, images: Any, keys: Any, *, persistent: bool = False) -> DataLoader[Any]:
    collate: Any = _collate
    if config.detects:
        from comrope.experiments.data.boxes import collate_boxes as collate
    return create_loader(
        images,
        keys,
        collate,
        workers=config.data.workers,
        pin_memory=torch.cuda.is_available() and config.train.device != "cpu",
        persistent=persistent,
    )
