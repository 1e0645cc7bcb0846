"""WebDataset shards: read by number, whole or named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import raises_for
from support.images import (
    contents,
    dataset_of,
    open_folder,
    picture,
    shards_of,
    spoil,
    write_tar,
)

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import Key
from comrope.experiments.data.shards import Shards, split_names

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def shards(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    shards_of(folder, out)
    return out


def test_shards_hold_what_the_folder_holds(folder, shards):
    for mode in ("RGB", "L"):
        found = open_folder(shards, name="shards", mode=mode)
        expected = open_folder(folder, mode=mode)
        for ours, theirs in zip(found, expected, strict=True):
            assert sorted(contents(ours)) == sorted(contents(theirs))
            assert {ours.load(index)[0].mode for index in range(len(ours))} == {mode}


def test_images_and_classes_meet_by_key(tmp_path):
    write_tar(
        tmp_path / "train-0.tar",
        {
            "b.cls": b"7\n",
            "notes.txt": b"no image",
            "sub/a.cls": b"3",
            "b.seg.png": picture(99),  # another file of the same sample
            "sub/a.JPG": picture(10, "jpeg"),
            "b.png": picture(20),
        },
    )
    source = Shards(str(tmp_path), "train", "L")
    found = {source.keys[i]: source.load(i) for i in range(len(source))}
    assert {key: target for key, (_, target) in found.items()} == {"b": 7, "sub/a": 3}
    assert np.asarray(found["b"][0]).tolist() == [[20] * 4] * 4
    assert abs(int(np.asarray(found["sub/a"][0])[0, 0]) - 10) <= 2
    assert source.name(0) == f"{tmp_path / 'train-0.tar'}: b"


def test_shards_of_other_splits_are_left_out(shards):
    (shards / "set-train-0000.tar").rename(shards / "retrieval-train-0000.tar")
    assert [len(source) for source in open_folder(shards, name="shards")] == [48, 16]


def test_shards_of_a_split_may_be_in_its_folder(shards):
    expected = [contents(source) for source in open_folder(shards, name="shards")]
    for split, folder in (("train", "train"), ("validation", "val")):
        (shards / folder).mkdir()
        for path in shards.glob(f"set-{split}-*.tar"):
            path.rename(shards / folder / path.name.removeprefix(f"set-{split}-"))
    assert [contents(source) for source in open_folder(shards, name="shards")] == expected


def test_a_split_may_have_another_name():
    assert split_names("val") == ("val", "validation", "valid")
    assert split_names("training") == ("training", "train")
    assert split_names("fold3") == ("fold3",)


def test_an_unreadable_sample_is_named(folder, tmp_path_factory):
    packed = tmp_path_factory.mktemp("packed")
    spoil(folder, "train")
    shards_of(folder, packed)
    (source,) = open_folder(packed, ["train"], name="shards")
    (bad,) = (i for i in range(48) if source.name(i).endswith(": dog_3"))
    fatal = dataset_of(source)[Key(0, 0, bad)].fatal
    assert fatal.startswith(f"{packed}/set-train-0")
    assert "dog_3" in fatal


def test_a_sample_without_image_or_class_cannot_be_read(tmp_path):
    members = {"a.png": picture(1), "b.cls": b"1", "c.png": picture(1), "c.cls": b"cat"}
    source = Shards(str(write_tar(tmp_path / "val.tar", members).parent), "val", "L")
    for index, problem in enumerate(("no .cls", "no image", "cat")):
        with pytest.raises(ValueError, match=problem):
            source.load(index)


def test_a_file_that_is_no_shard_is_named(shards):
    (shards / "set-train-0000.tar").write_bytes(b"not a tar")
    with pytest.raises(UserError, match=r"set-train-0000\.tar: "):
        open_folder(shards, name="shards")


def test_a_split_without_shards_or_samples_is_refused(tmp_path):
    with raises_for("data.root", UserError):
        open_folder(tmp_path, ["train"], name="shards")
    write_tar(tmp_path / "train.tar", {"notes.txt": b"no image"})
    with raises_for("data.root", UserError):
        open_folder(tmp_path, ["train"], name="shards")
