"""Samples of shards that are not clear, and shards that change."""

from __future__ import annotations

import os

import pytest
from support.faults import raises_line
from support.images import dataset_of, open_folder, picture, write_tar
from support.tars import tar_with

from comrope.experiments.data.batches import Key
from comrope.experiments.data.shards import _index

SAMPLES: dict[str, tuple[tuple[str, ...], str]] = {
    "two images": (("a.jpg", "a.png", "a.cls"), "a.png"),
    "two images, in capitals": (("a.JPG", "a.jpg", "a.cls"), "a.jpg"),
    "two images of two kinds": (("a.jpg", "a.jpeg", "a.cls"), "a.jpeg"),
    "two classes": (("a.jpg", "a.cls", "a.CLS"), "a.CLS"),
    "the same image": (("a.jpg", "a.cls", "a.jpg"), "a.jpg"),
    "the same class": (("a.jpg", "a.cls", "a.cls"), "a.cls"),
    "no samples": (("notes.txt", "a.json", "a.seg.png"), "no samples"),
}


@pytest.mark.parametrize("how", SAMPLES)
def test_samples_that_are_not_clear_are_named(how, tmp_path):
    names, named = SAMPLES[how]
    (tmp_path / "train.tar").write_bytes(tar_with(*names))
    with raises_line(tmp_path / "train.tar", named):
        _index(tmp_path / "train.tar")


CLASSES = {
    "empty": b"", "a word": b"cat", "negative": b"-1", "too large": b"7", "a half": b"0.5",
    "an underline": b"0_1", "other digits": b"\xd9\xa1", "many digits": b"1" * 5000,
    "many spaces": b" " * 5000 + b"1", "two": b"0 1", "16 bits": "1".encode("utf-16"),
}  # fmt: skip


def test_classes_that_are_no_numbers_are_named(tmp_path):
    members = {f"{how}.cls": content for how, content in CLASSES.items()}
    members |= {f"{how}.png": picture() for how in CLASSES}
    write_tar(tmp_path / "train.tar", {**members, "a.cls": b" 1\r\n", "a.png": picture()})
    (source,) = open_folder(tmp_path, ["train"], name="shards")
    for index in range(len(source)):
        item = dataset_of(source)[Key(0, 0, index)]
        if source.name(index).endswith(": a"):
            assert (item.fatal, item.target) == (None, 1)
        else:
            assert item.fatal.startswith(source.name(index))


def test_a_shard_that_shrinks_during_a_run_is_named(tmp_path):
    write_tar(tmp_path / "train.tar", {"a.png": picture(), "a.cls": b"10"})
    (source,) = open_folder(tmp_path, ["train"], name="shards")
    class_at, size = source.places[0].tolist()[2:]
    os.truncate(tmp_path / "train.tar", class_at + size - 1)  # "1"
    with pytest.raises(ValueError, match="shorter"):
        source.load(0)


@pytest.mark.parametrize("split", ["(", "a*", "[", "\\"])
def test_any_name_of_a_split_is_taken_literally(split, tmp_path):
    write_tar(tmp_path / "train.tar", {"a.png": picture(), "a.cls": b"1"})
    with raises_line("data.root: ", repr(split)):
        open_folder(tmp_path, [split], name="shards")


def test_a_damaged_shard_of_many_is_named(tmp_path):
    for number in range(5):
        write_tar(tmp_path / f"train-{number}.tar", {"a.png": picture(), "a.cls": b"1"})
    os.truncate(tmp_path / "train-3.tar", 512 * 3)
    with raises_line(tmp_path / "train-3.tar"):
        open_folder(tmp_path, ["train"], name="shards")
