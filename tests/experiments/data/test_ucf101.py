"""UCF-101's layout, and what is nearly one."""

from __future__ import annotations

import pytest
from helpers import raises_for
from support.videos import copied, eight, in_folders, numbers_of, open_videos, write_video

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.ucf101 import training_classes
from comrope.experiments.data.videos import Videos

# Lists


@pytest.mark.parametrize(
    ("videos", "splits"),
    [
        ("videos", "splits"),
        ("videos", "."),
        ("UCF-101", "ucfTrainTestlist"),
        (".", "."),
        (".", "splits"),
    ],
)
def test_layouts(ucf, videos, splits, tmp_path):
    root = copied(ucf, tmp_path, videos, splits)
    train, val = Videos(str(root), "trainlist01"), Videos(str(root), "testlist01")
    assert train.classes == val.classes == ["Emu", "Ant"]  # by number, not by name
    assert [train.target(i) for i in range(len(train))] == [0, 1, 1, 0]
    assert [val.target(i) for i in range(len(val))] == [1, 0]
    assert val.name(0) == str(root / videos / "Ant" / "v_Ant_2.avi")
    images, target = val.load(0, eight)
    assert (numbers_of(images), target) == (eight(16), 1)


def test_a_split_by_its_usual_name_is_list_01(ucf):
    for split in ("train", "training", "trainlist01"):
        assert len(Videos(str(ucf), split)) == 4
    for split in ("val", "validation", "valid", "test", "testlist01"):
        assert len(Videos(str(ucf), split)) == 2


def test_lists_as_windows_writes_them(ucf, tmp_path):
    root = copied(ucf, tmp_path)
    for name in ("classInd", "trainlist01", "testlist01"):
        file = root / "splits" / f"{name}.txt"
        text = (
            file.read_text().replace("\n", "\r\n\r\n  \r\n").replace("/", "\\").replace(" ", "\t")
        )
        file.write_bytes(text.encode("utf-8-sig"))
    for split in ("train", "val"):
        assert Videos(str(root), split).items == [
            (root / path.relative_to(ucf), target) for path, target in Videos(str(ucf), split).items
        ]


def test_names_with_spaces_and_digits(ucf, tmp_path):
    (tmp_path / "videos" / "Emu").mkdir(parents=True)
    write_video(tmp_path / "videos" / "Emu" / "v a 7.avi", 16)
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "classInd.txt").write_text("1 Emu")
    (tmp_path / "splits" / "testlist02.txt").write_text("Emu/v a 7.avi\nEmu/v a 7.avi 1\n")
    source = Videos(str(tmp_path), "testlist02")
    assert [numbers_of(source.load(i, eight)[0]) for i in range(2)] == [eight(16)] * 2


@pytest.mark.parametrize(
    ("name", "text", "place", "found"),
    [
        ("trainlist01", "Emu/a.avi 1\n\nCow/b.avi 2", "trainlist01.txt, line 3", "Cow/b"),
        ("trainlist01", "Emu/a.avi 2", "line 1", "expected 1"),
        ("trainlist01", "a.avi 1", "line 1", "CLASS/VIDEO"),
        ("trainlist01", "1", "line 1", "CLASS/VIDEO"),
        ("trainlist01", "\n \r\n", "trainlist01.txt", "at least one line"),
        ("trainlist01", None, "trainlist01.txt", "classInd.txt, testlist01.txt"),
        ("trainlist01", "Emu/../../../x.avi 1", "line 1", "inside the data set"),
        ("trainlist01", "../Emu/x.avi", "line 1", "inside the data set"),
        ("trainlist01", "/etc/passwd", "line 1", "inside the data set"),
        ("trainlist01", "..\\..\\x.avi", "line 1", "inside the data set"),
        ("trainlist01", "C:\\Emu\\x.avi", "line 1", "inside the data set"),
        ("trainlist01", b"\xff\xfeE\x00", "trainlist01.txt", "cannot be read"),
        ("classInd", None, "classInd.txt", "testlist01.txt, trainlist01.txt"),
        ("classInd", "", "classInd.txt", "at least one line"),
        ("classInd", "Emu\nAnt", "classInd.txt, line 1", "a number and a class"),
        ("classInd", "1 Emu\n2 Emu", "classInd.txt, line 2", "once"),
        ("classInd", "1 Emu\n1 Ant", "classInd.txt, line 2", "once"),
        ("classInd", "0 Emu\n1 Ant", "classInd.txt", "0 to 1"),
        ("classInd", "1 Cow", "data.root", "Cow"),
    ],
)
def test_lists_that_make_no_sense_are_refused_by_name(ucf, name, text, place, found, tmp_path):
    root = copied(ucf, tmp_path)
    file = root / "splits" / f"{name}.txt"
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=f"{place}.*{found}"):
        Videos(str(root), "train")


# Folders


def test_folders_without_lists(ucf, tmp_path):
    root = in_folders(ucf, tmp_path)
    (root / "train" / "Emu" / "._1.avi").write_bytes(b"what macOS leaves")
    (root / "train" / "Emu" / "readme.txt").write_text("no video")
    (root / "train" / ".hidden").mkdir()
    train, validation = open_videos(root)
    assert train.classes == validation.classes == ["Ant", "Emu"]
    assert [train.target(i) for i in range(len(train))] == [0, 1]
    assert [validation.target(i) for i in range(len(validation))] == [1]  # as in training
    assert numbers_of(validation.load(0, eight)[0]) == eight(16)


def test_training_folders_number_the_classes(ucf, tmp_path):
    assert training_classes(ucf, "train") is None  # lists number them
    assert training_classes(tmp_path, "train") is None
    assert training_classes(in_folders(ucf, tmp_path), "training") == ["Ant", "Emu"]


@pytest.mark.parametrize(
    ("change", "splits", "found"),
    [
        (("val/Emu", "val/Cow"), ("train", "val"), "Cow"),
        (("val/Bee", None), ("train", "val"), "Bee"),
        (("train/Bee", None), ("train", "val"), "'Bee'"),
        (("empty", None), ("empty", "val"), "empty"),
        (("other", None), ("trainlist01", "val"), "'trainlist01'; found other, train, val"),
    ],
)
def test_folders_that_make_no_sense_are_refused(ucf, change, splits, found, tmp_path):
    root = in_folders(ucf, tmp_path)
    (old, new) = change
    if new is None:
        (root / old).mkdir()
    else:
        (root / old).rename(root / new)
    with raises_for("data.root", UserError) as caught:
        open_videos(root, splits)
    assert found in str(caught.value)
