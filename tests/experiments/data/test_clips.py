"""Which frames make a clip, and shapes that move."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from helpers import raises_for
from hypothesis import given
from hypothesis import strategies as st

from comrope.experiments.data.clips import (
    Clips,
    Moving,
    Reading,
    check_count,
    frame_numbers,
    moving_clip,
)


def eight(count: int) -> list[int]:
    return frame_numbers(count, 8)


@given(
    count=st.integers(1, 3000),
    frames=st.integers(1, 70),
    span=st.floats(0.001, 1.0),
    seed=st.none() | st.integers(0, 2**32),
)
def test_frame_numbers_ascend_in_a_stretch_of_the_video(count, frames, span, seed):
    rng = None if seed is None else random.Random(seed)
    numbers = frame_numbers(count, frames, span=span, rng=rng)
    assert len(numbers) == frames
    assert numbers == sorted(numbers)
    assert 0 <= numbers[0] <= numbers[-1] < count
    length = max(1, round(span * count))
    assert numbers[-1] - numbers[0] < length
    if length >= frames:
        assert len(set(numbers)) == frames
    else:
        assert set(numbers) == set(range(numbers[0], numbers[0] + length))
    if seed is not None:
        assert numbers == frame_numbers(count, frames, span=span, rng=random.Random(seed))


@given(frames=st.integers(1, 20), width=st.integers(1, 20))
def test_uniform_frames_are_equally_far_apart_and_in_the_middle(frames, width):
    numbers = frame_numbers(frames * width, frames)
    assert numbers == [width // 2 + k * width for k in range(frames)]
    half = frame_numbers(2 * frames * width, frames, span=0.5)
    assert half == [n + frames * width // 2 for n in numbers]


def test_random_frames_reach_everything_and_prefer_no_direction_of_time():
    rng = random.Random(0)
    draws = [frame_numbers(16, 6, rng=rng) for _ in range(20000)]
    counts = Counter(n for numbers in draws for n in numbers)
    assert set(counts) == set(range(16))
    for n in range(8):
        assert counts[n] == pytest.approx(counts[15 - n], rel=0.06)
    assert {frame_numbers(16, 1, span=1 / 16, rng=rng)[0] for _ in range(500)} == set(range(16))


@pytest.mark.parametrize(
    ("count", "frames", "span"), [(0, 1, 1), (1, 0, 1), (9, 3, 0), (9, 3, 1.1)]
)
def test_frames_of_nothing_are_refused(count, frames, span):
    with pytest.raises(ValueError, match="count, frames, span: "):
        frame_numbers(count, frames, span=span)


class Headers(Clips):
    """One video whose header claims more frames than there are."""

    def __init__(self, claimed: int, existing: int) -> None:
        self.claimed, self.existing, self.classes = claimed, existing, ["only"]

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return "video"

    def target(self, index: int) -> int:
        return 5

    def read(self, index: int, choose) -> Reading:
        numbers = choose(self.claimed)
        frames = {n: np.full((2, 2), n) for n in numbers if n < self.existing}
        return Reading(self.claimed, numbers, frames, min(self.existing, numbers[-1] + 1))


@pytest.mark.parametrize(
    ("claimed", "existing", "error"),
    [
        (40, 40, None),
        (40, 36, None),
        (40, 35, "35 of 40"),
        (5, 3, None),
        (5, 2, "2 of 5"),
        (3, 1, "one frame"),
    ],
)
def test_a_header_may_be_wrong_by_two_frames_or_a_tenth(claimed, existing, error):
    asked = []

    def ends(count: int) -> list[int]:
        asked.append(count)
        return [0, count - 1]

    video = Headers(claimed, existing)
    if error is None:
        frames, target = video.load(0, ends)
        assert ([int(frame.mean()) for frame in frames], target) == ([0, existing - 1], 5)
        assert asked == [claimed, existing][: 1 + (claimed != existing)]
    else:
        with pytest.raises(ValueError, match=error):
            video.load(0, ends)
        # The frames after those that were chosen do not matter.
        assert len(video.load(0, lambda _: [0])[0]) == 1


def test_a_clip_needs_two_frames():
    check_count(2)
    for count in (0, 1):
        with pytest.raises(ValueError, match="frame"):
            check_count(count)


def test_a_clip_reversed_is_the_clip_of_the_other_class():
    for seed in range(30):
        left, right = moving_clip(seed, -1), moving_clip(seed, 1)
        assert left.shape == (16, 24, 24, 3)
        assert left.dtype == np.uint8
        assert np.array_equal(left, right[::-1])
        assert not np.array_equal(left, right)


def test_the_classes_differ_in_nothing_but_order():
    """Frame by frame, regardless of order, their distributions are the same."""
    source = Moving(train=True, mode="L", clips=1000)
    frames = np.array([source.load(k, range)[0] for k in range(1000)])
    columns = frames.astype(float).mean(2)  # (clips, frames, x)
    place = (columns * np.arange(24)).sum(-1) / columns.sum(-1)  # where it is bright
    moved = place[:, -1] - place[:, 0]
    assert ((moved > 0) == np.arange(1000) % 2).mean() > 0.99
    for statistic in (place.mean(1), place.std(1), frames.mean((1, 2, 3)), place.max(1)):
        left, right = statistic[::2], statistic[1::2]
        spread = (left.var() / len(left) + right.var() / len(right)) ** 0.5
        assert abs(left.mean() - right.mean()) < 3.5 * spread


@pytest.mark.parametrize(("frames", "size"), [(2, 8), (16, 24), (5, 64)])
def test_the_shape_stays_inside_and_moves_at_constant_speed(frames, size):
    for seed in range(100):
        clip = moving_clip(seed, 1, frames, size).astype(float).mean(-1)
        weight = np.where(clip > 100, 1.0, 0.0)
        assert weight.sum((1, 2)).min() > 0
        border = np.concatenate([weight[:, 0], weight[:, -1], weight[:, :, 0], weight[:, :, -1]], 1)
        assert border.sum() == 0 or size == 8
        x = (weight.sum(1) * np.arange(size)).sum(1) / weight.sum((1, 2))
        step = np.diff(x)
        assert x[-1] - x[0] > 0
        assert np.abs(step - step.mean()).max() < 1.5


def test_clips_are_balanced_reproducible_and_new_for_validation():
    train, val = Moving(train=True), Moving(train=False)
    assert Counter(map(train.target, range(len(train)))) == {0: 512, 1: 512}
    assert (train.classes, len(val)) == (["left", "right"], 256)
    again = Moving(train=True)
    for index in (0, 1, 77):
        (first, *_), target = train.load(index, eight)
        assert np.array_equal(first, again.load(index, eight)[0][0])
        assert not np.array_equal(first, val.load(index, eight)[0][0])
        assert target == index % 2
    assert train.load(3, eight)[0][0].shape == (24, 24, 3)
    assert len(Moving(train=True, clips=6)) == 6
    for odd in (0, 3):
        with raises_for("clips"):
            Moving(train=True, clips=odd)


def test_moving_clips_have_the_asked_mode_and_frames():
    for mode, shape in (("RGB", (20, 20, 3)), ("L", (20, 20))):
        source = Moving(train=False, mode=mode, frames_available=10, size=20)
        frames, _ = source.load(0, range)
        assert [(frame.shape, frame.dtype) for frame in frames] == [(shape, np.uint8)] * 10
    for wrong in ({"direction": 0}, {"frames": 1}, {"size": 7}):
        with pytest.raises(ValueError, match="direction, frames, size: "):
            moving_clip(**{"seed": 0, "direction": 1, **wrong})
