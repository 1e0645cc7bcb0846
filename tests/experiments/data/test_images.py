"""Sources of images: layouts and formats, classes, and what makes no sense."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from helpers import raises_for
from PIL import Image
from support.images import contents, open_folder

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.images import (
    CachedImages,
    Digits,
    open_images,
    pil_mode,
    require_root,
)

# What sources hold


def test_digits_are_divided_into_training_and_validation():
    train, validation = open_images(
        "digits", None, ["any", "other"], train_split="any", num_classes=10, mode="L"
    )
    assert (len(train), len(validation)) == (1437, 360)
    for source in (train, validation):
        image, target = source.load(0)
        assert (image.mode, image.size, type(target)) == ("L", (8, 8), int)
        found = contents(source)
        assert {target for target, _ in found} == set(range(10))
        assert max(max(pixels) for _, pixels in found) == 255
    assert Digits(train=True).load(3)[0].mode == "L"
    assert Digits(train=True, mode="RGB").load(3)[0].mode == "RGB"
    assert train.name(3) == "digit 3"


def test_images_of_all_formats_and_modes_get_one_mode(folder):
    for mode in ("RGB", "L"):
        train, validation = open_folder(folder, mode=mode)
        assert (len(train), len(validation)) == (48, 16)
        assert {train.load(index)[0].mode for index in range(48)} == {mode}
        assert sorted(target for target, _ in contents(train)) == [0] * 24 + [1] * 24
    for index in range(48):
        path = Path(train.name(index))
        assert path.is_file()
        assert path.parent.name == ("cat", "dog")[train.load(index)[1]]


def test_cached_images_are_the_images(folder):
    for mode in ("RGB", "L"):
        (source,) = open_folder(folder, ["train"], mode=mode)
        cached = CachedImages(source)
        assert contents(cached) == contents(source)
        assert {cached.load(index)[0].mode for index in range(48)} == {mode}
        assert [cached.name(i) for i in range(48)] == [source.name(i) for i in range(48)]


def test_the_training_split_is_not_needed_to_evaluate(folder):
    expected = contents(open_folder(folder)[1])
    shutil.rmtree(folder / "train")
    assert contents(open_folder(folder, ["val"])[0]) == expected


def test_data_sets_whose_classes_are_numbers_keep_them(monkeypatch):
    """Hugging Face's are: a map of class names would be applied to numbers, and fail."""
    import timm.data

    class Reader:
        class_to_idx: ClassVar = {"cat": 0, "dog": 1}

        def __getitem__(self, index):
            return Image.new("L", (8, 8), 100 * index), index

    class Set(list):
        reader = Reader()

    def open_set(name):
        return open_images(name, None, ["train", "validation"], train_split="train", num_classes=2)

    monkeypatch.setattr(timm.data, "create_dataset", lambda *_, **__: [(Image.new("L", (8, 8)), 1)])
    assert [source.load(0)[1] for source in open_set("torch/pets")] == [1, 1]
    asked = []

    def create(name, **options):
        asked.append((name, options))
        return Set([0, 1])

    monkeypatch.setattr(timm.data, "create_dataset", create)
    for source in open_set("hfds/pets"):
        assert [source.load(i)[1] for i in range(len(source))] == [0, 1]
        assert source.load(0)[0].mode == "RGB"
        assert source.name(1) == "image 1"  # its reader knows no file names
    assert all(name == "hfds/pets" and "class_map" not in o for name, o in asked)
    assert {o["split"] for _, o in asked} == {"train", "validation"}


@pytest.mark.slow
def test_imagenette_as_it_is_distributed(tmp_path):
    data = os.environ.get("COMROPE_DATA")
    if not data:
        pytest.skip("COMROPE_DATA is not set")
    with tarfile.open(Path(data) / "imagenette128.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    train, validation = open_folder(tmp_path / "imagenette128", num_classes=10)
    assert (len(train), len(validation)) == (9469, 3925)
    for source in (train, validation):
        loaded = [source.load(index) for index in range(0, len(source), 50)]
        assert {target for _, target in loaded} == set(range(10))
        assert {image.mode for image, _ in loaded} == {"RGB"}
        assert all(np.asarray(image).std() > 5 for image, _ in loaded)


# What is refused


@pytest.mark.parametrize(
    ("changes", "argument", "found"),
    [
        ({"root": "/no/such/place"}, "data.root", "/no/such/place"),
        ({"root": None}, "data.root", "--data"),
        ({"num_classes": 3}, "data.num_classes", "2 classes, got 3"),
        ({"name": "digits"}, "data.num_classes", "10 classes, got 2"),
        ({"splits": ["fit", "val"]}, "data.root", "'fit'; found train, val"),
        ({"name": "imagenet"}, "data.name", "imagenet"),
        ({"name": "wds/imagenet"}, "data.name", "stream"),
        ({"name": "torch/no_such_set"}, "data.name", "no_such_set"),
        ({"name": "torch/cifar10"}, "data.root", "'train'"),
    ],
)
def test_data_sets_that_do_not_exist_are_refused(folder, changes, argument, found):
    usual = {"name": "folder", "root": str(folder), "splits": ["train", "val"], "num_classes": 2}
    with raises_for(argument, UserError) as caught:
        open_images(train_split="train", **{**usual, **changes})
    assert found in str(caught.value)


def test_the_root_is_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with raises_for("data.root", UserError) as caught:
        require_root(str(tmp_path / "file"))
    assert "file" in str(caught.value)
    assert require_root(str(tmp_path)) == str(tmp_path)


def test_channels_are_one_or_three():
    assert (pil_mode(1), pil_mode(3)) == ("L", "RGB")
    with raises_for("data.in_chans", UserError):
        pil_mode(2)
