"""Decoded pixels that all loading processes share."""

from __future__ import annotations

import gc
import pickle
import time

import numpy as np
import psutil
import pytest
from helpers import raises_for
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data import cache
from comrope.experiments.data.cache import SIDE_BY_SIDE, PixelCache


def test_pictures_are_kept_unchanged():
    rng = np.random.default_rng(0)
    # More items than those that the memory is estimated from: these are decoded first.
    shapes = [[(2, 3, 3)], [], [(1, 1), (5, 4), (7, 2, 3)], [(9, 9)], *[[(3, 1)]] * 100]
    pictures = [[rng.integers(0, 256, s, dtype=np.uint8) for s in some] for some in shapes]

    def decode(index: int):
        if not pictures[index]:
            raise OSError(f"number {index}")
        return 10 * index, [Image.fromarray(p) for p in pictures[index]]

    cached = PixelCache(len(pictures), decode, "pictures")
    for one in (cached, pickle.loads(pickle.dumps(cached))):
        for index, expected in enumerate(pictures):
            if not expected:
                with pytest.raises(ValueError, match=r"^number 1$"):
                    one.load(index)
                continue
            assert one.load(index) == (10 * index, len(expected))
            for number, picture in enumerate(expected):
                assert np.array_equal(one.picture(index, number), picture)


def test_a_kept_error_is_the_same_each_time_it_is_raised():
    def decode(index: int):
        raise FileNotFoundError("no such file")

    cached, depths = PixelCache(1, decode, "pictures"), []
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^no such file$") as caught:
            cached.load(0)
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def black(index: int):
    return 0, [np.zeros((10, 10), np.uint8)]


def test_its_file_is_closed_with_it():
    def open_files() -> int:
        gc.collect()
        return psutil.Process().num_fds()

    def sent() -> tuple[PixelCache, PixelCache]:
        cached = PixelCache(3, black, "pictures")
        return cached, pickle.loads(pickle.dumps(cached))

    sent()  # starts what sends files, which stays
    before = open_files()
    caches = [sent() for _ in range(5)]
    assert open_files() >= before + 10
    del caches
    deadline = time.monotonic() + 10
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread that sends files closes its own
    assert open_files() <= before


def test_more_than_the_share_of_the_memory_is_refused(monkeypatch):
    needed = 40 * 10 * 10
    monkeypatch.setattr(cache, "available_memory", lambda: needed / cache.MAX_SHARE + 1)
    PixelCache(40, black, "pictures")
    for several in ("LOCAL_WORLD_SIZE", SIDE_BY_SIDE):  # each keeps all of them
        with monkeypatch.context() as patch, raises_for("data.cache", UserError):
            patch.setenv(several, "2")
            PixelCache(40, black, "pictures")
    monkeypatch.setattr(cache, "available_memory", lambda: needed / cache.MAX_SHARE - 1)
    with raises_for("data.cache", UserError):
        PixelCache(40, black, "pictures")


def test_items_that_cannot_be_decoded_do_not_lower_the_estimate(monkeypatch):
    def decode(index: int):
        if index % 2:
            raise OSError("damaged")
        return black(index)

    monkeypatch.setattr(cache, "available_memory", lambda: 20 * 10 * 10 / cache.MAX_SHARE)
    with raises_for("data.cache", UserError):
        PixelCache(32, decode, "pictures")
