"""Image folders and tars of them: order, classes and splits."""

from __future__ import annotations

import tarfile

import numpy as np
from helpers import raises_for
from PIL import Image
from support.images import contents, open_folder, picture, tar_of, write_tar

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.folders import FolderImages, find_split


def test_images_and_classes_have_their_natural_order(tmp_path):
    names = ("c10/a2.png", "c9/a10.png", "c9/a9.png", "c9/sub/z.png", "c9/B1.png")
    for grey, name in enumerate(names):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(picture(grey))
    write_tar(tmp_path / "train.tar", {n: picture(grey) for grey, n in enumerate(names)})
    for place in (tmp_path / "train", tmp_path / "train.tar"):
        source = FolderImages(place, "L")
        assert source.classes == ["c9", "c10", "sub"]
        loaded = [source.load(index) for index in range(len(source))]
        assert [(np.asarray(image)[0, 0], n) for image, n in loaded] == [
            (2, 0), (1, 0), (4, 0), (3, 2), (0, 1)
        ]  # fmt: skip
    assert source.name(0) == f"{tmp_path / 'train.tar'}: c9/a9.png"


def test_classes_get_the_numbers_of_others(tmp_path):
    write_tar(tmp_path / "val.tar", {"cat/1.png": picture(), "emu/1.png": picture()})
    source = FolderImages(tmp_path / "val.tar")
    source.number_as(["ant", "cat", "dog", "emu"])
    assert source.targets.tolist() == [1, 3]


def test_a_split_is_a_folder_or_a_tar(tmp_path):
    (tmp_path / "training").mkdir()
    write_tar(tmp_path / "valid.tar", {})
    (tmp_path / "test").touch()
    assert find_split(str(tmp_path), "train") == tmp_path / "training"
    assert find_split(str(tmp_path), "val") == tmp_path / "valid.tar"
    with raises_for("data.root", UserError, naming="'test'; found test"):
        find_split(str(tmp_path), "test")


def test_a_tar_holds_what_the_folder_holds(folder, tmp_path_factory):
    packed = tmp_path_factory.mktemp("packed")
    tar_of(folder, packed)
    for found, expected in zip(open_folder(packed), open_folder(folder), strict=True):
        assert sorted(contents(found)) == sorted(contents(expected))
    assert sorted(path.name for path in packed.iterdir()) == ["train.tar", "val.tar"]  # no index


def test_splits_have_several_names(folder):
    (folder / "train").rename(folder / "training")
    for split in ("train", "training"):
        assert len(open_folder(folder, [split, "validation"])[0]) == 48


# Classes


def test_validation_has_the_numbers_of_the_training_classes(folder):
    """A class without validation images would shift those after it."""
    (folder / "train" / "ant").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "train" / "ant" / "1.png")
    train, validation = open_folder(folder, num_classes=3)
    assert {target for target, _ in contents(train)} == {0, 1, 2}
    assert {target for target, _ in contents(validation)} == {1, 2}


def test_an_empty_class_is_named(folder):
    (folder / "train" / "emu").mkdir()
    with raises_for("data.root", UserError) as caught:
        open_folder(folder)
    assert "'emu'" in str(caught.value)


def test_a_class_that_is_not_in_training_is_named(folder):
    (folder / "val" / "emu").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "val" / "emu" / "1.png")
    with raises_for("data.root", UserError) as caught:
        open_folder(folder)
    assert "emu" in str(caught.value)


def test_a_file_that_is_no_tar_or_has_no_images_is_refused(tmp_path):
    (tmp_path / "train.tar").write_bytes(b"not a tar")
    with raises_for("data.root", UserError):
        open_folder(tmp_path, ["train"])
    tarfile.open(tmp_path / "train.tar", "w").close()
    with raises_for("data.root", UserError):
        open_folder(tmp_path, ["train"])
