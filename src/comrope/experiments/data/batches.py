"""The samples of every batch: a function of seed, epoch and step.

All processes draw the same order of an epoch, and every process loads its share of every batch. So
the samples of a step and their augmentations do not depend on the number of processes.
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

IGNORED = -1  # the target of a padding sample


class Source(Protocol):
    """The samples of a split, by number.

    It may have an attribute ``left_out``: names or ids of what it does not return, by reason.
    """

    def __len__(self) -> int: ...


class View(Protocol):
    """The form of validation samples: a hashable tuple, for example of a resolution."""

    @property
    def size(self) -> int:
        """Elements of one sample, such as pixels; the batch size is inversely proportional."""

    def _asdict(self) -> dict[str, Any]: ...


class Key(NamedTuple):
    """One sample of one epoch.

    ``place`` is the index in the epoch, which distinguishes repeated augmentations of a sample; -1
    marks padding.
    """

    epoch: int
    place: int
    sample: int
    view: View | None = None  # None: as in training


class AnyBatch(Protocol):
    """The attributes of a batch that training and evaluation require."""

    @property
    def unreadable(self) -> Sequence[str]:
        """The names of skipped samples."""

    @property
    def fatal(self) -> str | None:
        """An error that stops the run; the training process raises it, not the loading process."""


class Batch(NamedTuple):
    """Inputs and targets of supervised learning."""

    inputs: Tensor  # (B, ...)
    targets: Tensor  # (B, ...)
    unreadable: Sequence[str] = ()
    fatal: str | None = None

    def pin_memory(self) -> Batch:
        return self._replace(inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())


class TrainBatches:
    """The keys of this process's batches: all parts of every step, from step ``start`` on.

    Args:
        size: Samples of the training set.
        batch_size: Samples of a step, over all processes and parts.
        epochs: Passes over the training set.
        seed: Determines the order.
        parts: Batches whose gradients are accumulated in a step.
        repeats: Repeated augmentation: an epoch has 1/repeats of the samples, each ``repeats``
            times.
        process, processes: The index of this process, and the number of processes.
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
                order = self.order(epoch)
            first = (step % self.steps_per_epoch) * self.batch_size
            for part in range(self.parts):
                begin = first + (self.process * self.parts + part) * share
                samples = order[begin : begin + share].tolist()
                yield [Key(epoch, place, sample) for place, sample in enumerate(samples, begin)]


class ByView(Dataset[Any]):
    """The validation set in any view, which the key contains."""

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

    The loading processes are started once for all views, and end with ``close``.

    Args:
        source: The samples.
        dataset: Function from a view to the data set of all samples in that view, by ``Key``.
        collate: Function from a list of items to a batch.
        training_view: The view that ``batch_size`` refers to.
        batch_size: Samples of a batch over all processes; fewer in views of larger samples.
        process, processes: The index of this process, and the number of processes.
        workers: Loading processes.
        pin_memory: Whether batches are in pinned memory, for copies to a GPU.
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
        self.unreadable: dict[str, None] = {}  # names of skipped samples so far, each once

    def __len__(self) -> int:
        """Return the number of samples, over all processes."""
        return len(self.source)

    def batches(self, view: View) -> Iterator[Any]:
        """Return the batches of all samples in order, the same number in every process.

        The remaining batches of an earlier view are dropped.
        """
        self.keys[:] = self._keys(view)
        self.started = start(self.loader)
        return self._recorded(self.started)

    def _recorded(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.unreadable |= dict.fromkeys(getattr(batch, "unreadable", ()))
            yield batch

    def close(self) -> None:
        """End the loading processes."""
        end(self.started)
        self.loader._iterator = None  # otherwise torch would reuse it

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
