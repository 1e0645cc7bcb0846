"""Which samples meet in a batch, in training and in evaluation."""

from __future__ import annotations

import os
from collections import Counter
from itertools import chain
from typing import NamedTuple

import psutil
import pytest
from helpers import raises_for
from hypothesis import given
from hypothesis import strategies as st

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import Key, TrainBatches, Validation


class Square(NamedTuple):
    """A view of images with this side."""

    side: int

    @property
    def size(self) -> int:
        return self.side**2


class Numbers:
    """A data set whose samples are their keys and the process that loads them."""

    def __init__(self, view: Square) -> None:
        self.view = view

    def __getitem__(self, key: Key) -> tuple[Key, int]:
        assert key.view == self.view
        return key, os.getpid()


def train_batches(**options) -> TrainBatches:
    return TrainBatches(1437, **{"batch_size": 120, "epochs": 3, "seed": 0, **options})


def validation(samples: int = 40, **options) -> Validation:
    options = {"training_view": Square(12), "batch_size": 4, **options}
    return Validation(range(samples), Numbers, list, **options)


def keys_of(batches) -> list[list[Key]]:
    return [[key for key, _ in batch] for batch in batches]


# Training


def test_an_epoch_has_every_sample_at_most_once_each_time_in_another_order():
    batches = train_batches()
    assert len(batches) == batches.steps == 3 * batches.steps_per_epoch == 33
    keys = list(chain(*batches))
    orders = [[k.sample for k in keys if k.epoch == epoch] for epoch in range(3)]
    assert all(len(set(order)) == len(order) == 11 * 120 for order in orders)
    assert [k.place for k in keys] == 3 * [*range(11 * 120)]
    other = next(iter(train_batches(seed=1)))
    assert len({tuple(order[:120]) for order in [*orders, [k.sample for k in other]]}) == 4


@pytest.mark.parametrize(("processes", "parts"), [(2, 1), (1, 4), (3, 2)])
def test_processes_and_parts_share_out_the_same_batches(processes, parts):
    shares = [
        list(train_batches(parts=parts, process=process, processes=processes))
        for process in range(processes)
    ]
    for step, batch in enumerate(train_batches()):
        taken = [share[step * parts : (step + 1) * parts] for share in shares]
        assert list(chain(*chain(*taken))) == batch


def test_a_resumed_order_is_the_rest_of_it():
    for start in (7, 11):
        resumed = train_batches(start=start, parts=2)
        assert len(resumed) == (33 - start) * 2
        assert list(resumed) == list(train_batches(parts=2))[2 * start :]


def test_repeated_augmentation_repeats_samples_at_places_of_their_own():
    batch = next(iter(train_batches(repeats=3)))
    assert set(Counter(key.sample for key in batch).values()) == {3}
    assert len({key.place for key in batch}) == 120


@pytest.mark.parametrize(
    "options", [{"batch_size": 1438}, {"batch_size": 121, "processes": 2}, {"parts": 7}]
)
def test_a_batch_size_that_cannot_be_shared_out_is_refused(options):
    with raises_for("train.batch_size", UserError):
        train_batches(**options)


# Evaluation


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 30),
    processes=st.integers(1, 4),
    side=st.integers(1, 60),
)
def test_every_sample_is_evaluated_once_however_many_processes(
    samples, batch_size, processes, side
):
    shares = [
        keys_of(
            validation(
                samples,
                batch_size=batch_size * processes,
                process=process,
                processes=processes,
            ).batches(Square(side))
        )
        for process in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1  # else processes would wait for each other
    assert len({len(batch) for share in shares for batch in share}) == 1
    inorder = [key for step in zip(*shares, strict=True) for batch in step for key in batch]
    assert [key.sample for key in inorder if key.place >= 0] == list(range(samples))
    assert [key.place for key in inorder if key.place >= 0] == list(range(samples))
    assert all(key.epoch == 0 and key.sample < samples for key in inorder)


def test_views_of_larger_samples_get_smaller_batches():
    sizes = {
        side: len(next(iter(validation(200, batch_size=36, processes=2).batches(Square(side)))))
        for side in (6, 12, 24, 36, 120)
    }
    assert sizes == {6: 18, 12: 18, 24: 4, 36: 2, 120: 1}


def test_what_is_left_of_a_view_is_dropped():
    found = validation()
    assert len(found) == 40
    next(found.batches(Square(12)))
    second = keys_of(found.batches(Square(6)))
    assert [key.sample for key in chain(*second)] == list(range(40))
    assert {key.view for key in chain(*second)} == {Square(6)}


@pytest.mark.usefixtures("server")
def test_one_set_of_processes_serves_all_views_and_ends():
    found = validation(workers=2)
    seen = set()
    for side in (12, 16, 20):
        for number, batch in enumerate(found.batches(Square(side))):
            seen |= {process for _, process in batch}
            if side == 16 and number == 3:
                break
    assert len(seen) == min(2, os.cpu_count() or 1)
    assert os.getpid() not in seen
    assert all(psutil.pid_exists(process) for process in seen)
    found.close()
    assert not any(psutil.pid_exists(process) for process in seen)
    ((_, process), *_) = next(found.batches(Square(12)))  # it can be started again
    assert process not in seen
    found.close()
