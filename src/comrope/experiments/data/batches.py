"""Which samples meet in a batch: a function of seed, epoch and step alone.

The order of an epoch is drawn for the whole training run, and every process takes its share of
every batch. So the same samples meet in a step, augmented in the same way, whatever the number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import generator
from comrope.experiments.data.workers import create_loader, end, start

__all__ = ["IGNORED", "AnyBatch", "Batch", "Key", "Source", "TrainBatches", "Validation", "View"]

IGNORED = -1  # the target of a sample that only fills a batch


class Source(Protocol):
    """The samples of a split, by number."""

    def __len__(self) -> int: ...


class View(Protocol):
    """How the samples of a validation set are presented: a hashable tuple, such as a resolution."""

    @property
    def size(self) -> int:
        """Elements of one sample, such as pixels: the larger, the fewer samples in a batch."""

    def _asdict(self) -> dict[str, Any]: ...


class Key(NamedTuple):
    """One sample of one epoch.

    ``place`` in the epoch distinguishes the repeated augmentations of a sample; -1 marks a sample
    that only fills a batch.
    """

    epoch: int
    place: int
    sample: int
    view: View | None = None  # None: as in training


class AnyBatch(Protocol):
    """What training and evaluation require of every batch."""

    @property
    def unreadable(self) -> Sequence[str]:
        """The names of samples that were skipped."""

    @property
    def fatal(self) -> str | None:
        """Why the run must stop: raised in the training process, not in a loading process."""


class Batch(NamedTuple):
    """Inputs and targets of supervised learning."""

    inputs: Tensor  # (B, ...)
    targets: Tensor  # (B, ...)
    unreadable: Sequence[str] = ()
    fatal: str | None = None

    def pin_memory(self) -> Batch:
        return self._replace(inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())


class TrainBatches:
    """The keys of this process's batches, part after part of every step, from ``start`` on.

    Args:
        size: Samples of the training set.
        batch_size: Samples of a step, over all processes and parts.
        epochs: How often the training set is gone through.
        seed: Decides the order.
        parts: Batches whose gradients are added up in a step.
        repeats: Repeated augmentation: an epoch has 1/repeats of the samples, each so many times.
        process, processes: The number of this process, and how many there are.
        start: The first step.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        epochs: int,
        seed: int,
        parts: int = 1,
        repeats: int = 1,
        process: int = 0,
        processes: int = 1,
        start: int = 0,
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.parts, self.repeats = parts, repeats
        self.process, self.processes = process, processes
        self.steps_per_epoch = size // batch_size
        self.steps = self.steps_per_epoch * epochs
        self.start = start
        if not self.steps_per_epoch:
            raise UserError(
                f"train.batch_size: expected at most {size}, the number of training samples, got "
                f"{batch_size}"
            )
        if batch_size % (processes * parts):
            raise UserError(
                f"train.batch_size: expected a multiple of {processes} processes x "
                f"train.accumulate {parts}, got {batch_size}"
            )

    def order(self, epoch: int) -> Tensor:
        """Return the samples of an epoch in their order, (size,)."""
        order = torch.randperm(self.size, generator=generator(self.seed, "order", epoch))
        return order.repeat_interleave(self.repeats)[: self.size]

    def __len__(self) -> int:
        return (self.steps - self.start) * self.parts

    def __iter__(self) -> Iterator[list[Key]]:
        share = self.batch_size // (self.processes * self.parts)
        epoch = -1
        for step in range(self.start, self.steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.order(epoch).tolist()
            first = (step % self.steps_per_epoch) * self.batch_size
            for part in range(self.parts):
                begin = first + (self.process * self.parts + part) * share
                yield [Key(epoch, place, order[place]) for place in range(begin, begin + share)]


class ByView(Dataset[Any]):
    """The validation set in any view: a key names the view."""

    def __init__(self, dataset: Callable[[Any], Dataset[Any]]) -> None:
        self.dataset = dataset
        self.opened: dict[View, Any] = {}

    def __getitem__(self, key: Key) -> Any:
        assert key.view is not None
        if key.view not in self.opened:
            self.opened[key.view] = self.dataset(key.view)
        return self.opened[key.view][key]


class Validation:
    """This process's share of the validation set, in any view.

    The loading processes are started once, for all views, and stay until ``close``.

    Args:
        source: The samples.
        dataset: From a view to the data set of all samples in it, by ``Key``.
        collate: From a list of its items to a batch.
        training_view: The view of training; ``batch_size`` is that of batches in it.
        batch_size: Samples of a batch over all processes. Views of larger samples get fewer.
        process, processes: The number of this process, and how many there are.
        workers: Loading processes.
        pin_memory: Whether batches are put into memory that a GPU copies from.
    """

    def __init__(
        self,
        source: Any,
        dataset: Callable[[Any], Dataset[Any]],
        collate: Callable[[list[Any]], Any],
        *,
        training_view: View,
        batch_size: int,
        process: int = 0,
        processes: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.source, self.training_view, self.batch_size = source, training_view, batch_size
        self.process, self.processes = process, processes
        self.keys: list[list[Key]] = []
        self.loader: DataLoader[Any] = create_loader(
            ByView(dataset),
            self.keys,
            collate,
            workers=workers,
            pin_memory=pin_memory,
            persistent=True,
        )
        self.started: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the number of samples, over all processes."""
        return len(self.source)

    def batches(self, view: View) -> Iterator[Any]:
        """Return the batches of all samples in order, equally many in every process.

        What is left of an earlier view is dropped.
        """
        self.keys[:] = self._keys(view)
        self.started = start(self.loader)
        return self.started

    def close(self) -> None:
        """End the loading processes."""
        end(self.started)
        self.loader._iterator = None  # else torch would use it again

    def _keys(self, view: View) -> list[list[Key]]:
        samples, batch, processes = len(self), self.batch_size, self.processes
        share = int(batch * self.training_view.size / view.size / processes)
        share = max(1, min(share, batch // processes, -(-samples // processes)))
        count = -(-samples // (share * processes))
        return [
            [
                Key(0, place if place < samples else -1, min(place, samples - 1), view)
                for place in range(
                    (b * processes + self.process) * share,
                    (b * processes + self.process + 1) * share,
                )
            ]
            for b in range(count)
        ]
