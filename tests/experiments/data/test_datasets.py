"""Images and clips behind their augmentation: draws by key, unreadable samples, batches."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from support.images import dataset_of, evaluation, open_folder, spoil, training

from comrope.experiments.data.batches import IGNORED, Key
from comrope.experiments.data.clips import Moving
from comrope.experiments.data.datasets import (
    MAX_DRAWS,
    MAX_UNREADABLE,
    ClipDataset,
    Item,
    collate_images,
)
from comrope.experiments.data.images import CachedImages, Digits
from comrope.experiments.data.videos import open_clips
from comrope.experiments.data.workers import create_loader, end, start

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = 2  # of 255 levels, after two axes


def digits(**options):
    options = {"channels": 1, "num_classes": 10, **options}
    return dataset_of(Digits(train=True), training(1, 16, scale=(0.1, 1.0)), **options)


def generators() -> tuple:
    return random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())  # noqa: NPY002


# Draws


def test_augmentation_is_a_function_of_seed_epoch_and_place():
    images, others = digits(), digits(seed=1)
    first = images[Key(0, 5, 9)].image
    assert (first.shape, first.dtype) == ((1, 16, 16), torch.uint8)
    assert torch.equal(images[Key(0, 5, 9)].image, first)
    for other in (images[Key(1, 5, 9)], images[Key(0, 6, 9)], others[Key(0, 5, 9)]):
        assert not torch.equal(other.image, first)
        assert other.target == Digits(train=True).targets[9]


@pytest.mark.parametrize("policy", [None, "rand-m9-mstd0.5", "augmix-m5-w4-d2"])
def test_draws_neither_use_nor_change_the_generators_of_others(policy):
    clips = clips_of(
        Noise(3),
        training(3, 12, auto_augment=policy, hflip=0.5),
        random_frames=True,
        draws_from_numpy=policy is not None,
    )
    found = []
    for seed in range(2):
        random.seed(seed), torch.manual_seed(seed), np.random.seed(seed)  # noqa: NPY002
        before = generators()
        found.append([clips[Key(0, place, 0)].image for place in range(6)])
        assert generators() == before
    assert all(map(torch.equal, *found))


def test_a_draw_that_a_transform_refuses_is_made_again():
    drawn = []

    def fails(image):
        drawn.append(random.random())
        if len(drawn) < MAX_DRAWS:
            raise ValueError("zero bits")
        return np.zeros((1, 2, 2), np.uint8)

    images = digits()
    assert images.draw(fails, None, Key(0, 0, 0)).shape == (1, 2, 2)
    assert len(set(drawn)) == MAX_DRAWS

    def always_fails(image):
        raise ValueError("zero bits")

    with pytest.raises(ValueError, match="zero bits"):
        images.draw(always_fails, None, Key(0, 0, 0))


# Samples that cannot be read


@pytest.mark.parametrize("cache", [False, True])
def test_an_unreadable_image_stops_the_run_by_name_or_is_skipped(folder, cache):
    bad = spoil(folder, "train")
    source = open_folder(folder)[0]
    source = CachedImages(source) if cache else source
    number = next(n for n in range(len(source)) if source.name(n) == str(bad))
    for training_set in (True, False):
        item = dataset_of(source, training=training_set)[Key(0, 0, number)]
        assert str(bad) in item.fatal
        assert "data.unreadable=skip" in item.fatal
    item, next_one = (
        dataset_of(source, skip=True)[Key(0, 0, index)] for index in (number, number + 1)
    )
    assert (item.unreadable, item.fatal) == ([str(bad)], None)
    assert torch.equal(item.image, next_one.image)
    assert (item.target, next_one.unreadable) == (next_one.target, [])


def test_in_evaluation_no_image_takes_the_place_of_another(folder):
    bad = spoil(folder, "val")
    for mode, channels in (("L", 1), ("RGB", 3)):
        source = open_folder(folder, mode=mode)[1]
        images = dataset_of(source, training=False, skip=True, channels=channels)
        items = [images[Key(0, index, index)] for index in range(len(source))]
        assert {item.image.shape for item in items} == {(channels, 16, 16)}
        assert [item.target for item in items if not item.unreadable] == [0] * 8 + [1] * 7
        (blank,) = (item for item in items if item.unreadable)
        assert (blank.target, blank.unreadable, blank.fatal) == (IGNORED, [str(bad)], None)
        assert not blank.image.any()


class Unreadable:
    """No image of this source can be read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"image {index}"

    def load(self, index: int):
        raise OSError("damaged")


@pytest.mark.parametrize("count", [MAX_UNREADABLE + 10, 3])
def test_too_many_unreadable_images_in_a_row_stop_the_run(count):
    item = dataset_of(Unreadable(count), skip=True)[Key(0, 0, 2)]
    assert item.fatal.startswith("image 2 ")
    assert len(item.unreadable) == MAX_UNREADABLE
    item = dataset_of(Unreadable(count), skip=True, training=False)[Key(0, 0, 2)]
    assert (item.fatal, item.unreadable, item.target) == (None, ["image 2"], IGNORED)


@pytest.mark.parametrize("in_training", [True, False])
def test_an_image_of_a_class_out_of_range_is_unreadable(in_training):
    number = Digits(train=True).targets.tolist().index(7)
    stop, skip = (digits(num_classes=5, training=in_training, skip=s) for s in (False, True))
    fatal = stop[Key(0, 0, number)].fatal
    assert f"digit {number}: " in fatal
    assert "class 7" in fatal
    item = skip[Key(0, 0, number)]
    assert item.unreadable[0] == f"digit {number}"
    assert item.target in (range(5) if in_training else [IGNORED])
    assert bool(item.image.any()) == in_training


def test_a_place_that_only_fills_a_batch_loads_nothing():
    item = dataset_of(Unreadable(9))[Key(0, -1, 2)]
    assert (item.image.shape, item.target) == ((3, 16, 16), IGNORED)
    assert (item.unreadable, item.fatal) == ([], None)


# Clips


class Noise:
    """Clips of noise; the frames of the second have several sizes."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __len__(self) -> int:
        return 2

    def name(self, index: int) -> str:
        return f"noise {index}"

    def load(self, index, choose):
        sizes = itertools.cycle([(37, 53), (41, 29)] if index else [(37, 53)])
        frames = [self.frame(number, next(sizes)) for number in range(16)]
        return [frames[number] for number in choose(16)], 0

    def frame(self, number: int, size: tuple[int, int]) -> np.ndarray:
        rng = np.random.default_rng((number, *size))
        channels = () if self.channels == 1 else (self.channels,)
        return rng.integers(0, 256, (*size, *channels), np.uint8)


class Still(Noise):
    """Clips whose frames are alike."""

    def frame(self, number: int, size: tuple[int, int]) -> np.ndarray:
        return super().frame(0, size)


class Counted(Noise):
    """Frames whose grey is their number."""

    def frame(self, number: int, size: tuple[int, int]) -> np.ndarray:
        return np.full((12, 12), number, np.uint8)


def clips_of(source, transform=None, *, frames: int = 4, **options) -> ClipDataset:
    channels = source.channels
    transform = transform or training(channels, 12)
    usual = {"seed": 0, "num_classes": 2, "channels": channels, "training": True}
    return ClipDataset(source, transform, frames=frames, **{**usual, **options})


def both_ways(clips: ClipDataset, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a clip as it is made at once, and frame by frame."""
    found = clips[key].image
    clips.whole, whole = None, clips.whole
    wanted = clips[key].image
    clips.whole = whole
    return found, wanted


def apart(a, b) -> int:
    """Return the most that two pictures differ by."""
    return int((torch.as_tensor(a).int() - torch.as_tensor(b).int()).abs().max())


@pytest.mark.parametrize(
    ("channels", "options", "rounding"),
    [
        (1, {}, ROUNDING),
        (3, {"hflip": 0.5}, ROUNDING),
        (1, {"ratio": (0.3, 3.0)}, ROUNDING),
        # Three steps of it, each cut to whole levels, and what was rounded before is made larger.
        (3, {"color_jitter": 0.4, "hflip": 0.5}, 5),
        (1, {"color_jitter": 0.4}, 5),
    ],
)
def test_training_draws_for_a_clip_what_it_draws_for_each_frame(channels, options, rounding):
    clips = clips_of(Noise(channels), training(channels, 12, **options), random_frames=True)
    assert clips.whole is not None
    pairs = [both_ways(clips, Key(0, place, 0)) for place in range(12)]
    for found, wanted in pairs:
        assert found.shape == wanted.shape == (channels, 4, 12, 12)
        assert apart(found, wanted) <= rounding
    for (one, _), (other, _) in itertools.pairwise(pairs):
        assert apart(one, other) > 30


@pytest.mark.parametrize(("size", "frames", "span"), [(12, 4, 1.0), (8, 6, 0.5), (56, 3, 1.0)])
@pytest.mark.parametrize("crop", [1.0, 0.8])
def test_evaluation_makes_of_a_clip_what_it_makes_of_each_frame(size, frames, span, crop):
    transform = evaluation(1, size, crop_pct=crop)
    clips = clips_of(Noise(1), transform, frames=frames, span=span, training=False)
    found, wanted = both_ways(clips, Key(0, 3, 0))
    assert found.shape == (1, frames, size, size)
    assert apart(found, wanted) <= ROUNDING


def test_frames_of_several_sizes_go_one_by_one():
    found, wanted = both_ways(clips_of(Noise(1)), Key(0, 0, 1))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"auto_augment": "rand-m9-mstd0.5"},
        {"interpolation": "bicubic"},
        {"interpolation": "random"},
    ],
)
def test_transforms_that_take_single_frames_only_draw_the_same_for_all(options):
    transform = training(3, 12, **options)
    clips = clips_of(Still(3), transform, draws_from_numpy="auto_augment" in options)
    assert clips.whole is None
    for place in range(8):
        clip = clips[Key(0, place, 0)].image
        assert (clip == clip[:, :1]).all()


def frames_of(clips: ClipDataset, key: Key) -> list[int]:
    return clips[key].image[0, :, 0, 0].tolist()


def test_the_frames_of_a_clip_are_drawn_by_key_or_equally_far_apart():
    drawn = clips_of(Counted(1), random_frames=True)
    chosen = {place: frames_of(drawn, Key(0, place, 0)) for place in range(8)}
    assert len({tuple(frames) for frames in chosen.values()}) > 4
    assert chosen[3] == frames_of(drawn, Key(0, 3, 0)) != frames_of(drawn, Key(1, 3, 0))
    assert chosen != {
        place: frames_of(clips_of(Counted(1), random_frames=True, seed=1), Key(0, place, 0))
        for place in range(8)
    }
    uniform = clips_of(Counted(1))
    assert frames_of(uniform, Key(0, 0, 0)) == frames_of(uniform, Key(1, 5, 0)) == [2, 6, 10, 14]
    assert frames_of(clips_of(Counted(1), span=0.5), Key(0, 0, 0)) == [5, 7, 9, 11]
    assert frames_of(clips_of(Counted(1), backwards=True), Key(0, 0, 0)) == [14, 10, 6, 2]


def test_a_clip_that_cannot_be_read_is_blank(folder):
    class Source(Unreadable):
        channels = 3

        def load(self, index, choose):
            raise OSError("damaged")

    for channels in (1, 3):
        source = Source(2)
        source.channels = channels
        transform = evaluation(channels, 12)
        item = clips_of(source, transform, training=False, skip=True)[Key(0, 3, 1)]
        assert (item.image.shape, item.target) == ((channels, 4, 12, 12), IGNORED)
        assert not item.image.any()


def test_gestures_are_made_at_once_as_frame_by_frame(gesture5):
    train, validation = open_clips(
        "ucf101", str(gesture5), ("trainlist01", "testlist01"), num_classes=5
    )
    train.channels = validation.channels = 3
    for size in (64, 128, 160):
        clips = clips_of(validation, evaluation(3, size), frames=8, num_classes=5, training=False)
        for index in range(0, len(validation), 17):
            assert apart(*both_ways(clips, Key(0, index, index))) <= ROUNDING
    options = {"scale": (0.5, 1.0), "color_jitter": 0.0}
    clips = clips_of(train, training(3, 128, **options), frames=8, num_classes=5)
    for place in range(0, len(train), 50):
        assert apart(*both_ways(clips, Key(0, place, place))) <= ROUNDING


# Batches


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_its_clips_with_channels_last_in_memory(workers):
    source = Moving(train=True)
    source.channels = 3
    clips = clips_of(source, random_frames=True)
    keys = [Key(0, place, place) for place in range(8)]
    batches = start(create_loader(clips, [keys], collate_images, workers=workers, pin_memory=False))
    batch = next(batches)
    end(batches)
    assert torch.equal(batch.inputs, torch.stack([clips[key].image for key in keys]))
    assert batch.inputs.shape == (8, 3, 4, 12, 12)
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last_3d)
    assert batch.targets.tolist() == [0, 1] * 4


def test_a_batch_names_all_unreadable_samples_and_the_first_fatal_one():
    image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    items = [
        Item(image, 1, ["a"], None),
        Item(image, IGNORED, ["b", "c"], "first"),
        Item(image, 0, [], "second"),
    ]
    batch = collate_images(items)
    assert batch.targets.tolist() == [1, IGNORED, 0]
    assert batch.targets.dtype == torch.int64
    assert [*batch.unreadable] == ["a", "b", "c"]
    assert batch.fatal == "first"
    assert collate_images(items[:1]).fatal is None
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
