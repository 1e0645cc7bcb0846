"""UCF-101's layout, and what is nearly one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comrope.experiments.common.errors import UserError
from comrope.experiments.data import clips, workers
from comrope.experiments.data.videos import Videos, open_clips
from experiments.videos import copied, data_of, eight, numbers_of, write_video


@pytest.mark.parametrize("videos", ["videos", "UCF-101", "."])
@pytest.mark.parametrize("splits", ["splits", "ucfTrainTestlist", "."])
def test_layouts(ucf, videos, splits, tmp_path):
    root = copied(ucf, tmp_path, videos, splits)
    train, val = Videos(str(root), "trainlist01"), Videos(str(root), "testlist01")
    assert train.classes == val.classes == ["Emu", "Ant"]  # by number, not by name
    assert [train.target(i) for i in range(len(train))] == [0, 1, 1, 0]
    assert [val.target(i) for i in range(len(val))] == [1, 0]
    assert val.name(0) == str(root / videos / "Ant" / "v_Ant_2.avi")
    images, target = val.load(0, eight)
    assert (numbers_of(images), target) == (eight(16), 1)


@pytest.mark.parametrize("split", ["train", "training", "val", "validation", "test", "testlist01"])
def test_a_split_by_its_usual_name_is_list_01(ucf, split):
    assert len(Videos(str(ucf), split)) == (4 if split.startswith("train") else 2)


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
    root = copied(ucf, tmp_path)
    path = write_video(tmp_path / "v a 7.avi", 16)
    (root / "videos" / "Emu" / "v a 7.avi").symlink_to(path)  # into the shared folder
    try:
        (root / "splits" / "testlist02.txt").write_text("Emu/v a 7.avi\nEmu/v a 7.avi 1\n")
        source = Videos(str(root), "testlist02")
        assert [numbers_of(source.load(i, eight)[0]) for i in range(2)] == [eight(16)] * 2
    finally:
        (ucf / "videos" / "Emu" / "v a 7.avi").unlink()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trainlist01", "Emu/a.avi 1\n\nCow/b.avi 2", r"trainlist01.txt, line 3: .*got 'Cow/b"),
        ("trainlist01", "Emu/a.avi 2", r"line 1: expected 1, the number that Emu .*, got 2"),
        ("trainlist01", "a.avi 1", r"line 1: expected CLASS/VIDEO"),
        ("trainlist01", "1", r"line 1: expected CLASS/VIDEO"),
        ("trainlist01", "\n \r\n", r"trainlist01.txt: expected at least one line, got none"),
        ("trainlist01", None, r"trainlist01.txt is not there; found classInd.txt, testlist01.txt"),
        ("trainlist01", "Emu/../../../x.avi 1", "line 1: expected a path inside the data set"),
        ("trainlist01", "../Emu/x.avi", "line 1: expected a path inside the data set"),
        ("trainlist01", "/etc/passwd", "line 1: expected a path inside the data set"),
        ("trainlist01", "..\\..\\x.avi", "line 1: expected a path inside the data set"),
        ("trainlist01", "C:\\Emu\\x.avi", "line 1: expected a path inside the data set"),
        ("trainlist01", b"\xff\xfeE\x00", r"trainlist01.txt: cannot be read"),
        ("classInd", None, r"classInd.txt is not there; found testlist01.txt, trainlist01.txt"),
        ("classInd", "", r"classInd.txt: expected at least one line"),
        ("classInd", "Emu\nAnt", r"classInd.txt, line 1: expected a number and a class, got 'Emu'"),
        ("classInd", "1 Emu\n2 Emu", r"classInd.txt, line 2: expected every number and class once"),
        ("classInd", "1 Emu\n1 Ant", r"classInd.txt, line 2: expected every number and class once"),
        ("classInd", "0 Emu\n1 Ant", r"classInd.txt: expected numbers from 1 to 2, got 0 to 1"),
        ("classInd", "1 Cow", r"data.root: expected folders of classes, such as Cow, in "),
    ],
)
def test_lists_that_make_no_sense_are_refused_by_name(ucf, name, text, message, tmp_path):
    root = copied(ucf, tmp_path)
    file = root / "splits" / f"{name}.txt"
    file.unlink() if text is None else file.write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )
    with pytest.raises(UserError, match=message):
        Videos(str(root), "train")


def test_a_file_that_a_list_names_is_missed_when_it_is_loaded(ucf, tmp_path):
    root = copied(ucf, tmp_path)
    with (root / "splits" / "testlist01.txt").open("a") as file:
        file.write("Emu/v_gone.avi\n")
    source = Videos(str(root), "val")
    assert len(source) == 3
    with pytest.raises(FileNotFoundError, match="no such file"):
        source.load(2, eight)
    assert source.name(2).endswith("v_gone.avi")


def in_folders(ucf: Path, out: Path) -> Path:
    for split, name, k in (("train", "Emu", 0), ("train", "Ant", 0), ("val", "Emu", 1)):
        (out / split / name).mkdir(parents=True, exist_ok=True)
        (out / split / name / "1.avi").symlink_to(ucf / "videos" / name / f"v_{name}_{k}.avi")
    return out


def test_folders_without_lists(ucf, tmp_path):
    root = in_folders(ucf, tmp_path)
    (root / "train" / "Emu" / "._1.avi").write_bytes(b"what macOS leaves")
    (root / "train" / "Emu" / "readme.txt").write_text("no video")
    train, val = open_clips(data_of(root))
    assert train.classes == ["Ant", "Emu"]
    assert [(len(s), [s.target(i) for i in range(len(s))]) for s in (train, val)] == [
        (2, [0, 1]),
        (1, [1]),  # as training numbers them
    ]
    assert numbers_of(val.load(0, eight)[0]) == eight(16)
    (root / "val" / "Emu").rename(root / "val" / "Cow")
    with pytest.raises(UserError, match=r"split 'validation' of .* that training has not: Cow"):
        open_clips(data_of(root))
    (root / "train" / "Bee").mkdir()
    with pytest.raises(UserError, match="class 'Bee' of split 'train' has no videos"):
        open_clips(data_of(root))
    with pytest.raises(UserError, match="nor a folder for split 'trainlist01'; found train, val"):
        open_clips(data_of(root, train_split="trainlist01"))
    (root / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"expected a folder for every class in .*empty, found none"
    ):
        open_clips(data_of(root, train_split="empty"))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", ["ucf101", "moving"])
def test_training_and_validation_clips(ucf, name, cache, monkeypatch):
    monkeypatch.setattr(clips, "MOVING_CLIPS", {"train": 100, "val": 50})
    for in_chans, channels in ((1, ()), (3, (3,))):
        data = data_of(ucf, name=name, cache=cache, in_chans=in_chans)
        train, val = open_clips(data, train=True)
        nothing, same = open_clips(data, train=False)
        assert nothing is None
        assert len(train) > len(val) == len(same)
        for source in (train, val, same):
            images, target = source.load(len(source) - 1, eight)
            assert {image.shape[2:] for image in images} == {channels}
            assert (len(images), target in (0, 1)) == (8, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "kinetics"}, "data.name: expected ucf101 or moving, got 'kinetics'"),
        ({"in_chans": 2}, "data.in_chans: expected 1 or 3, got 2"),
        ({"num_classes": 101}, "data.num_classes: split 'train' of .* has 2 classes, got 101"),
        ({"name": "moving", "num_classes": 5}, "data.num_classes: moving has 2 classes, got 5"),
        ({"root": None}, "data.root: not given"),
        ({"root": "/no/such/place"}, "data.root: /no/such/place is not there"),
        ({"val_split": "testlist07"}, r"data.root: .*testlist07.txt is not there; found classInd"),
    ],
)
def test_bad_settings_are_refused(ucf, fields, message):
    with pytest.raises(UserError, match=message):
        open_clips(data_of(ucf, **fields))


def test_without_opencv_it_says_what_to_install(ucf, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match=r'pip install "comrope\[video\]"'):
        open_clips(data_of(ucf))
    assert open_clips(data_of(ucf, name="moving"))[0] is not None


def test_more_than_the_memory_is_not_cached(ucf, monkeypatch):
    size = 4 * 16 * 48 * 64 * 3
    data = data_of(ucf, cache=True)
    monkeypatch.setattr(workers, "_memory", lambda: size / 0.8 - 1)
    with pytest.raises(UserError, match=r"data.cache: 4 videos .* GiB .* data.cache=false"):
        open_clips(data)
    monkeypatch.setattr(workers, "_memory", lambda: size / 0.8 + 1)
    open_clips(data)
    for several in ("LOCAL_WORLD_SIZE", workers.SIDE_BY_SIDE):
        monkeypatch.setenv(several, "2")
        with pytest.raises(UserError, match=r"data.cache: "):
            open_clips(data)
        monkeypatch.delenv(several)


def test_there_is_some_memory():
    assert 2**20 < workers._memory() < 2**50


def test_splits_with_videos_in_common_are_refused(ucf, tmp_path):
    root = copied(ucf, tmp_path)
    (root / "splits" / "testlist01.txt").write_text("Ant/v_Ant_0.avi\nAnt/v_Ant_2.avi\n")
    with pytest.raises(UserError, match=r"data.val_split: .* 1 videos in common, such as .*Ant_0"):
        open_clips(data_of(root))
    assert len(open_clips(data_of(root), train=False)[1]) == 2


def test_validation_folders_are_numbered_as_training_whoever_asks(ucf, tmp_path):
    root = in_folders(ucf, tmp_path)
    for train in (True, False):
        val = open_clips(data_of(root, train_split="train", val_split="val"), train=train)[1]
        assert val.classes == ["Ant", "Emu"]
        assert {val.target(index) for index in range(len(val))} == {1}
