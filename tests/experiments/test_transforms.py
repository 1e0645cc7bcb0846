"""A whole clip at once is what each of its frames would be, alone and through Pillow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from comrope.experiments.config import load_recipe
from comrope.experiments.data.batches import Key, Normalize, TrainBatches, Validation, train_loader
from comrope.experiments.data.images import open_sources
from comrope.experiments.data.transforms import RandomCrop, Resize, resized
from comrope.experiments.tasks.views import View, usual_view

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = 2  # of 255 levels, after two axes


def noise(height: int, width: int, channels: int = 3, frames: int = 3) -> np.ndarray:
    """Nothing is like its neighbour: half a pixel beside the right place is far off."""
    rng = np.random.default_rng((height, width, channels))
    return rng.integers(0, 256, (frames, height, width, channels), np.uint8)


def apart(a, b) -> int:
    """The most that two pictures differ by."""
    return int((torch.as_tensor(a).int() - torch.as_tensor(b).int()).abs().max())


class Box:
    """timm's random crop, with a part that is given."""

    scale = ratio = None

    def __init__(self, box: tuple[int, int, int, int], size: tuple[int, int]) -> None:
        self.box, self.size = box, size

    def get_params(self, *_):
        return self.box


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(112, 112), (33, 57), (7, 5)])
@pytest.mark.parametrize(
    ("frame", "box"),
    [
        ((112, 150), (5, 20, 99, 105)),
        ((112, 150), (0, 0, 112, 150)),
        ((61, 37), (60, 36, 1, 1)),
        ((61, 37), (3, 1, 53, 9)),
        ((240, 321), (11, 0, 229, 321)),
        ((120, 120), (1, 3, 112, 112)),
    ],
)
def test_a_part_is_what_pillow_makes_of_it_frame_by_frame(frame, box, size, channels):
    top, left, height, width = box
    pixels = noise(*frame, channels)
    clip = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    found = RandomCrop(Box(box, size))(clip).permute(0, 2, 3, 1)
    for one, pixel in zip(found, pixels, strict=True):
        picture = Image.fromarray(pixel.squeeze(-1) if channels == 1 else pixel)
        part = picture.crop((left, top, left + width, top + height))
        wanted = np.array(part.resize(size[::-1], Image.Resampling.BILINEAR))
        assert one.shape == (*size, channels)
        assert apart(one, wanted.reshape(one.shape)) <= ROUNDING


@pytest.mark.parametrize("frame", [(112, 150), (151, 112), (9, 31), (57, 57)])
def test_the_shorter_side_is_what_pillow_makes_of_it(frame):
    pixels = noise(*frame)
    for side in (9, 57, 112):
        step = Resize(type("Step", (), {"size": side}))
        found = step(torch.from_numpy(pixels).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        height, width = (max(side, side * n // min(frame)) for n in frame)
        for one, pixel in zip(found, pixels, strict=True):
            wanted = Image.fromarray(pixel).resize((width, height), Image.Resampling.BILINEAR)
            assert one.shape == (height, width, 3)
            assert apart(one, np.array(wanted)) <= ROUNDING


def test_layouts_in_memory_make_no_difference():
    clip = torch.from_numpy(noise(45, 61)).permute(0, 3, 1, 2)
    assert torch.equal(resized(clip, (30, 80)), resized(clip.contiguous(), (30, 80)))


class Noise:
    """Clips of noise; of the second, the frames differ in size."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __len__(self) -> int:
        return 2

    def name(self, index: int) -> str:
        return f"noise {index}"

    def load(self, index, choose):
        sizes = itertools.cycle([(37, 53), (41, 29)] if index else [(37, 53)])
        found = [noise(*next(sizes), self.channels, 16)[n] for n in choose(16)]
        return [one.squeeze(-1) if self.channels == 1 else one for one in found], 0


def moving(**overrides):
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_recipe("moving").with_overrides({"augment.scale": (0.3, 1.0), **named})


def both_ways(cuts, key) -> tuple[torch.Tensor, torch.Tensor]:
    """A clip as it is made, and frame by frame."""
    found = cuts[key].image
    cuts.whole, whole = None, cuts.whole
    wanted = cuts[key].image
    cuts.whole = whole
    return found, wanted


def trained_on(config, source):
    return train_loader(config, source, TrainBatches(config, 1024)).dataset


COLOURS = {"data__in_chans": 3, "data__mean": (0.2,) * 3, "data__std": (0.2,) * 3}


@pytest.mark.parametrize(
    ("fields", "rounding"),
    [
        ({}, ROUNDING),
        ({"augment__hflip": 0.5, **COLOURS}, ROUNDING),
        ({"augment__ratio": (0.3, 3.0), "augment__frames": "uniform"}, ROUNDING),
        # Three steps of it, each cut to whole levels, and what was rounded before is made larger.
        ({"augment__color_jitter": 0.4, "augment__hflip": 0.5, **COLOURS}, 5),
        ({"augment__color_jitter": 0.4}, 5),
    ],
)
def test_training_draws_for_a_clip_what_it_draws_for_each_frame(fields, rounding):
    config = moving(**fields)
    cuts = trained_on(config, Noise(config.data.in_chans))
    assert cuts.whole is not None
    clips = [both_ways(cuts, Key(0, place, 0)) for place in range(12)]
    for found, wanted in clips:
        assert found.shape == wanted.shape == (config.data.in_chans, 4, 12, 12)
        assert apart(found, wanted) <= rounding
    for (one, _), (other, _) in itertools.pairwise(clips):
        assert apart(one, other) > 30


@pytest.mark.parametrize("crop", [1.0, 0.8])
@pytest.mark.parametrize("view", [View(12, 4), View(8, 6, 0.5), View(56, 3)])
def test_evaluation_too(view, crop):
    config = moving(augment__crop_pct=crop)
    views = Validation(config, Noise(1)).loader.dataset
    views[Key(0, 0, 0, view)]
    found, wanted = both_ways(views.images[view], Key(0, 0, 0))
    assert found.shape == (1, view.frames, view.resolution, view.resolution)
    assert apart(found, wanted) <= ROUNDING


def test_frames_of_several_sizes_go_one_by_one():
    cuts = trained_on(moving(), Noise(1))
    found, wanted = both_ways(cuts, Key(0, 0, 1))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "fields",
    [
        {"augment__auto_augment": "rand-m9-mstd0.5", **COLOURS},
        {"augment__interpolation": "bicubic"},
        {"augment__interpolation": "random"},
    ],
)
def test_what_only_pillow_does_is_done_frame_by_frame_and_alike(fields):
    class Still(Noise):
        def load(self, index, choose):
            frames, target = super().load(index, choose)
            return frames[:1] * len(frames), target

    config = moving(**fields)
    cuts = trained_on(config, Still(config.data.in_chans))
    assert cuts.whole is None
    for place in range(8):
        clip = cuts[Key(0, place, 0)].image
        assert (clip == clip[:, :1]).all()


@pytest.mark.parametrize("auto", [None, "rand-m9-mstd0.5", "augmix-m5-w4-d2"])
def test_draws_depend_on_no_generator_but_their_own_and_leave_them_alone(auto):
    config = moving(augment__auto_augment=auto, augment__hflip=0.5, **COLOURS)
    cuts = trained_on(config, Noise(3))
    found = []
    for seed in range(2):
        np.random.seed(seed)  # noqa: NPY002
        found.append([cuts[Key(0, place, 0)].image for place in range(6)])
        drawn = np.random.rand()  # noqa: NPY002
        assert drawn == np.random.RandomState(seed).rand()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_its_clips_and_reaches_the_model_in_the_usual_order(workers):
    config = moving(data__workers=workers, **COLOURS)
    source = open_sources(config)[0]
    batches = TrainBatches(config, len(source))
    loader = train_loader(config, source, batches)
    found = next(iter(loader)).images
    wanted = torch.stack([loader.dataset[key].image for key in next(iter(batches))])
    assert torch.equal(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last_3d)
    normalize = Normalize(config, torch.device("cpu"))
    assert normalize(found).is_contiguous()
    assert torch.equal(normalize(found), normalize(wanted.contiguous()))


def test_gestures(gesture5):
    """Real ones: as in the recipe, in training and in evaluation."""
    config = load_recipe("gesture5").with_overrides(
        {"data.root": str(gesture5), "data.cache": False, "data.workers": 0}
    )
    source, validation = open_sources(config)
    cuts = trained_on(config, source)
    views = Validation(config, validation).loader.dataset
    for view in (usual_view(config), View(64, 8), View(160, 8)):
        views[Key(0, 0, 0, view)]
        for index in range(0, len(validation), 17):
            assert apart(*both_ways(views.images[view], Key(0, index, index))) <= ROUNDING
    for place in range(0, len(source), 50):
        assert apart(*both_ways(cuts, Key(0, place, place))) <= ROUNDING
