"""Transforms: timm's for one image, and the same for a whole clip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from support.images import evaluation, training

from comrope.experiments.common.randomness import seeded
from comrope.experiments.data.transforms import RandomCrop, Resize, resized, whole_clip

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = 2  # of 255 levels, after two axes


def noise(height: int, width: int, channels: int = 3, frames: int = 3) -> np.ndarray:
    """Return frames in which no pixel is like its neighbour: half a pixel aside is far off."""
    rng = np.random.default_rng((height, width, channels))
    return rng.integers(0, 256, (frames, height, width, channels), np.uint8)


def apart(a, b) -> int:
    """Return the most that two pictures differ by."""
    return int((torch.as_tensor(a).int() - torch.as_tensor(b).int()).abs().max())


# Timm's


def drawn(transform, image: Image.Image, seed: int = 0) -> np.ndarray:
    with seeded(seed):
        return np.array(transform(image))


def test_results_are_bytes_of_the_asked_shape():
    image = Image.fromarray(noise(30, 50)[0])
    for transform in (training(3, 16), evaluation(3, 16, crop_pct=0.8)):
        found = drawn(transform, image)
        assert (found.shape, found.dtype) == ((3, 16, 16), np.uint8)
    assert drawn(evaluation(1, 16), image.convert("L")).shape == (1, 16, 16)


def test_options_of_training_reach_their_step():
    image = Image.fromarray(noise(30, 50)[0])
    plain = {"scale": (1.0, 1.0), "ratio": (5 / 3, 5 / 3)}
    whole = drawn(training(3, 16, **plain), image)
    wanted = image.resize((16, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(whole, np.array(wanted).transpose(2, 0, 1))
    flipped = drawn(training(3, 16, **plain, hflip=1.0), image)
    assert np.array_equal(flipped, whole[..., ::-1])
    for change in (
        {"scale": (0.1, 0.3)},
        {"ratio": (0.3, 0.5)},
        {"color_jitter": 0.9},
        {"auto_augment": "rand-m9-mstd0.5"},
        {"interpolation": "bicubic"},
    ):
        assert apart(drawn(training(3, 16, **{**plain, **change}), image), whole) > ROUNDING, change
    # Without jitter nothing is drawn for it: runs depend on the order of draws.
    assert not any("Jitter" in type(step).__name__ for step in training(3).transforms)


def test_evaluation_takes_the_middle():
    pixels = noise(40, 60)[0]
    found = drawn(evaluation(3, 20, crop_pct=0.5), Image.fromarray(pixels))
    assert np.array_equal(found, pixels[10:30, 20:40].transpose(2, 0, 1))
    found = drawn(evaluation(3, 40, crop_pct=1.0), Image.fromarray(pixels))
    assert np.array_equal(found, pixels[:, 10:50].transpose(2, 0, 1))


def test_evaluation_draws_no_interpolation():
    image = Image.fromarray(noise(30, 50)[0])
    found = drawn(evaluation(3, 16, interpolation="random"), image)
    assert np.array_equal(found, drawn(evaluation(3, 16, interpolation="bicubic"), image))
    assert not np.array_equal(found, drawn(evaluation(3, 16, interpolation="bilinear"), image))


# Whole clips


class GivenCrop:
    """timm's random crop, with a part that is given."""

    scale = ratio = None

    def __init__(self, box: tuple[int, int, int, int], size: tuple[int, int]) -> None:
        self.box, self.size = box, size

    def get_params(self, *_):
        return self.box


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
def test_a_crop_is_what_pillow_returns_frame_by_frame(frame, box):
    top, left, height, width = box
    for size, channels in (((112, 112), 1), ((112, 112), 3), ((33, 57), 1), ((7, 5), 3)):
        pixels = noise(*frame, channels)
        clip = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        found = RandomCrop(GivenCrop(box, size))(clip).permute(0, 2, 3, 1)
        for one, pixel in zip(found, pixels, strict=True):
            picture = Image.fromarray(pixel.squeeze(-1) if channels == 1 else pixel)
            part = picture.crop((left, top, left + width, top + height))
            wanted = np.array(part.resize(size[::-1], Image.Resampling.BILINEAR))
            assert one.shape == (*size, channels)
            assert apart(one, wanted.reshape(one.shape)) <= ROUNDING


@pytest.mark.parametrize("frame", [(112, 150), (151, 112), (9, 31), (57, 57)])
def test_the_shorter_side_is_resized_as_pillow_does_it(frame):
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


@pytest.mark.parametrize("channels", [1, 3])
def test_a_whole_clip_gets_the_draw_of_each_frame(channels):
    """The data set that uses it is tested with more transforms."""
    frames = [f.squeeze(-1) if channels == 1 else f for f in noise(37, 53, channels)]
    for transform in (training(channels, 12, hflip=0.5), evaluation(channels, 12, crop_pct=0.8)):
        whole = whole_clip(transform)
        for seed in range(8):
            with seeded(seed):
                found = whole(frames)
            assert found.shape == (channels, 3, 12, 12)
            for number, frame in enumerate(frames):
                wanted = drawn(transform, Image.fromarray(frame), seed)
                assert apart(found[:, number], wanted) <= ROUNDING


@pytest.mark.parametrize("options", [{"auto_augment": "rand-m9"}, {"interpolation": "bicubic"}, {}])
def test_steps_that_take_pillow_images_only_have_none(options):
    assert (whole_clip(training(3, 12, **options)) is None) == bool(options)
    if "interpolation" in options:
        assert whole_clip(evaluation(3, 12, **options)) is None
