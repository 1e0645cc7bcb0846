"""Clips: exactly the frames that were chosen, whole or named as what cannot be read."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tarfile
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from comrope.experiments import video
from comrope.experiments.config import Data
from comrope.experiments.errors import UserError
from comrope.experiments.video import (
    CachedVideos,
    Moving,
    Videos,
    frame_numbers,
    moving_clip,
    open_clips,
)

cv2 = pytest.importorskip("cv2")
video._opencv()  # quiet, before it is used

FRAMES = 40


def write_video(path: Path, frames: int = FRAMES, codec: str = "MJPG", size=(64, 48)) -> Path:
    """Every frame has its number as its grey, 20 + 5 n."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), 25, size)
    assert writer.isOpened()
    for number in range(frames):
        writer.write(np.full((size[1], size[0], 3), 20 + 5 * number, np.uint8))
    writer.release()
    return path


def numbers_of(images: list[Image.Image]) -> list[int]:
    grey = [np.asarray(image).mean() for image in images]
    numbers = [round((g - 18) / 5) for g in grey]  # codecs make it a little darker
    assert all(abs(20 + 5 * n - g) < 4.5 for n, g in zip(numbers, grey, strict=True)), grey
    return numbers


def source_of(*paths: Path, mode: str = "RGB") -> Videos:
    """These files, without a layout."""
    source = object.__new__(Videos)
    source.mode, source.classes = mode, ["only"]
    source.items = [(path, 0) for path in paths]
    return source


def eight(count: int) -> list[int]:
    return frame_numbers(count, 8)


@pytest.fixture(scope="module")
def ucf(tmp_path_factory) -> Path:
    """UCF-101's layout: two classes, two training videos and one validation video each."""
    root = tmp_path_factory.mktemp("ucf")
    for name in ("Emu", "Ant"):
        for k in range(3):
            write_video(root / "videos" / name / f"v_{name}_{k}.avi", 16)
    lists = {
        "classInd": "2 Ant\n1 Emu\n",
        "trainlist01": "Emu/v_Emu_0.avi 1\nAnt/v_Ant_0.avi 2\nAnt/v_Ant_1.avi 2\nEmu/v_Emu_1.avi 1",
        "testlist01": "Ant/v_Ant_2.avi\nEmu/v_Emu_2.avi\n",
    }
    (root / "splits").mkdir()
    for name, text in lists.items():
        (root / "splits" / f"{name}.txt").write_text(text)
    return root


def copied(ucf: Path, out: Path, videos: str = "videos", splits: str = "splits") -> Path:
    """The same in other places; the videos as links."""
    (out / videos).mkdir(parents=True, exist_ok=True)
    (out / splits).mkdir(parents=True, exist_ok=True)
    for folder in (ucf / "videos").iterdir():
        (out / videos / folder.name).symlink_to(folder)
    for file in (ucf / "splits").iterdir():
        (out / splits / file.name).write_bytes(file.read_bytes())
    return out


# Which frames


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
    with pytest.raises(ValueError, match="count, frames, span: expected"):
        frame_numbers(count, frames, span=span)


# Decoding


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.avi", "MJPG"), ("b.mp4", "mp4v"), ("c.avi", "XVID"), ("d.mkv", "mp4v"), ("e.MOV", "mp4v")],
)
@pytest.mark.parametrize("cache", [False, True])
def test_chosen_frames_are_exactly_those(name, codec, cache, tmp_path):
    source = source_of(write_video(tmp_path / name, codec=codec))
    source = CachedVideos(source) if cache else source
    assert numbers_of(source.load(0, range)[0]) == list(range(FRAMES))
    for seed in range(20):
        rng = random.Random(seed)
        chosen = frame_numbers(FRAMES, 1 + seed, span=rng.uniform(0.1, 1), rng=rng)
        images, target = source.load(0, lambda _, numbers=chosen: numbers)
        assert numbers_of(images) == chosen
        assert {(image.mode, image.size) for image in images} == {("RGB", (64, 48))}
        assert target == 0


def test_colours_are_red_first_and_modes_as_asked(tmp_path):
    path = tmp_path / "red.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 25, (32, 32))
    for _ in range(3):
        writer.write(np.full((32, 32, 3), (0, 0, 255), np.uint8))  # OpenCV's red
    writer.release()
    red, green, blue = np.asarray(source_of(path).load(0, eight)[0][0]).mean((0, 1))
    assert red > 240
    assert max(green, blue) < 15
    (grey, *_), _ = source_of(path, mode="L").load(0, eight)
    assert grey.mode == "L"
    assert np.asarray(grey).mean() == pytest.approx(76, abs=4)


def test_a_header_that_is_a_little_wrong_is_a_choice_from_what_is_there(tmp_path):
    whole = write_video(tmp_path / "whole.avi").read_bytes()
    found = {}
    for size in range(len(whole) * 6 // 10, len(whole), len(whole) // 150):
        path = tmp_path / f"{size}.avi"
        path.write_bytes(whole[:size])
        reading = source_of(path).read(0, range)
        found.setdefault((reading.said, reading.seen), path)
    asked = []

    def ends(count: int) -> list[int]:
        asked.append(count)
        return [0, count - 2, count - 1]

    assert {(FRAMES, n) for n in (20, 35, 36, 39)} <= set(found)
    for (said, seen), path in found.items():
        for source in (source_of(path), CachedVideos(source_of(path))):
            asked.clear()
            if said - seen > 4:
                with pytest.raises(ValueError, match=rf"truncated, {seen} of {FRAMES} frames"):
                    source.load(0, ends)
                # What was chosen is there: that the rest is not is nobody's concern.
                assert numbers_of(source.load(0, lambda _: [3, 9])[0]) == [3, 9]
            else:
                images = source.load(0, ends)[0]
                assert len(images) == 3
                assert numbers_of(images[:2]) == [0, seen - 2]  # the last one may be cut
                assert asked == [said, seen][: 1 + (said != seen)]


def test_one_frame_is_no_clip_whatever_the_header_says(tmp_path):
    whole = write_video(tmp_path / "three.avi", 3).read_bytes()
    path, said = tmp_path / "cut.avi", set()
    for size in range(len(whole) // 2, len(whole), 50):
        path.write_bytes(whole[:size])
        with contextlib.suppress(ValueError):
            if source_of(path).read(0, range)[::3] == (3, 1):
                with pytest.raises(ValueError, match="one frame is no clip") as caught:
                    source_of(path).load(0, eight)
                said.add(str(caught.value))
    assert said


def hostile(folder: Path) -> dict[str, tuple[Path, str]]:
    """Files by kind, and what is said of them."""
    avi, mp4 = write_video(folder / "whole.avi"), write_video(folder / "whole.mp4", codec="mp4v")
    xvid = write_video(folder / "xvid.avi", codec="XVID")
    unreadable = "no video that OpenCV can read"
    found = {
        "one frame": (write_video(folder / "one.avi", 1), "one frame is no clip"),
        "missing": (folder / "missing.avi", "no such file"),
        "folder": (folder / "folder.avi", "not a file"),
        "pipe": (folder / "pipe.avi", "not a file"),
        "empty": (folder / "empty.avi", "an empty file"),
        "text": (folder / "text.avi", unreadable),
        "numbered text": (folder / "img_0001.avi", unreadable),
        "noise": (folder / "noise.mp4", unreadable),
        "sound": (folder / "sound.avi", unreadable),
        "picture": (folder / "picture.avi", "one frame is no clip"),
        "playlist": (folder / "playlist.mp4", unreadable),
        "name that is no text": (folder / "\udcff.avi", "surrogates"),
    }
    found["name that is no text"][0].write_bytes(avi.read_bytes())
    found["folder"][0].mkdir()
    os.mkfifo(found["pipe"][0])
    found["empty"][0].write_bytes(b"")
    found["text"][0].write_text("not a video\n" * 200)
    found["numbered text"][0].write_text("not a picture either")
    found["noise"][0].write_bytes(np.random.default_rng(0).bytes(20000))
    with wave.open(str(found["sound"][0]), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    Image.new("RGB", (20, 20)).save(folder / "picture.png")
    (folder / "picture.png").rename(found["picture"][0])
    found["playlist"][0].write_text(f"#EXTM3U\n#EXTINF:10,\n{avi}\n#EXT-X-ENDLIST\n")
    for whole, percents in ((avi, (5, 20, 40, 60, 80)), (mp4, (5, 50, 95)), (xvid, (40, 80))):
        for percent in percents:
            path = folder / f"{whole.stem}_{percent}{whole.suffix}"
            path.write_bytes(whole.read_bytes()[: whole.stat().st_size * percent // 100])
            said = rf"{unreadable}|truncated, \d+ of {FRAMES} frames"
            found[path.name] = path, said
    return found


def test_what_cannot_be_read_says_why_however_often_and_harms_nothing_else(tmp_path):
    files = hostile(tmp_path)
    good = write_video(tmp_path / "gut übung 手.avi")
    source = source_of(*(path for path, _ in files.values()), good)
    cached = CachedVideos(source)
    for kind, (index, (_, message)) in zip(files, enumerate(files.values()), strict=True):
        for one in (source, cached, cached):
            with pytest.raises(Exception, match=message) as caught:
                one.load(index, eight)
            assert not isinstance(caught.value, UserError), kind
    for one in (source, cached):
        assert numbers_of(one.load(len(files), eight)[0]) == eight(FRAMES)


def test_bad_files_leave_the_terminal_alone(tmp_path):
    hostile(tmp_path)
    code = f"""
from pathlib import Path
from comrope.experiments.video import _decode
for path in Path({str(tmp_path)!r}).iterdir():
    try:
        _decode(path, range, "RGB")
    except Exception:
        pass
print("done")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("done\n", "")


def test_loading_keeps_no_memory(tmp_path):
    import psutil

    good = write_video(tmp_path / "good.mp4", codec="mp4v", size=(320, 240))
    bad = tmp_path / "bad.avi"
    bad.write_bytes(write_video(tmp_path / "whole.avi").read_bytes()[:-20000])
    source = source_of(good, bad)
    cached = CachedVideos(source_of(good, tmp_path / "missing.avi"))

    def load(times: int) -> int:
        for _ in range(times):
            for one in (source, cached):
                one.load(0, eight)
                with pytest.raises((ValueError, FileNotFoundError)):
                    one.load(1, eight)
        return psutil.Process().memory_info().rss

    before = load(20)
    assert load(200) - before < 8 * 2**20


def test_an_error_that_is_kept_does_not_grow(tmp_path):
    cached = CachedVideos(source_of(tmp_path / "missing.avi"))
    assert cached.items[0].__traceback__ is None  # nor does it hold what was decoded before it
    depths = []
    for _ in range(3):
        with pytest.raises(FileNotFoundError) as caught:
            cached.load(0, eight)
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


class Loaded(Dataset):
    def __init__(self, source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> list[int]:
        return numbers_of(self.source.load(index, eight)[0])


@pytest.mark.parametrize("cache", [False, True])
def test_forked_processes_load_after_this_one_did(cache, tmp_path):
    paths = [write_video(tmp_path / f"{n}.mp4", n, "mp4v") for n in (10, 20, 30, 40)]
    source = source_of(*paths)
    if cache:
        source = CachedVideos(source)
    cv2.setNumThreads(2)
    source_of(*paths).load(0, eight)
    assert cv2.getNumThreads() == 1  # what a fork leaves behind is waited for
    cv2.resize(np.zeros((2000, 2000, 3), np.uint8), (1000, 1000))
    loader = DataLoader(
        Loaded(source), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert list(loader) == [eight(n) for n in (10, 20, 30, 40)]


# Layouts


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


def data_of(folder: Path, **fields) -> Data:
    usual = {"name": "ucf101", "root": str(folder), "num_classes": 2}
    return Data(**{**usual, **fields})


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


# Opening


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", ["ucf101", "moving"])
def test_training_and_validation_clips(ucf, name, cache, monkeypatch):
    monkeypatch.setattr(video, "MOVING_CLIPS", {"train": 100, "val": 50})
    for in_chans, mode in ((1, "L"), (3, "RGB")):
        data = data_of(ucf, name=name, cache=cache, in_chans=in_chans)
        train, val = open_clips(data, train=True)
        nothing, same = open_clips(data, train=False)
        assert nothing is None
        assert len(train) > len(val) == len(same)
        for source in (train, val, same):
            images, target = source.load(len(source) - 1, eight)
            assert {image.mode for image in images} == {mode}
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
    monkeypatch.setattr(video, "_memory", lambda: size / 0.8 - 1)
    with pytest.raises(UserError, match=r"data.cache: 4 videos .* GiB .* data.cache=false"):
        open_clips(data)
    monkeypatch.setattr(video, "_memory", lambda: size / 0.8 + 1)
    open_clips(data)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"data.cache: "):
        open_clips(data)


def test_there_is_some_memory():
    assert 2**20 < video._memory() < 2**50


# Moving shapes


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
    frames = np.array([[np.asarray(i) for i in source.load(k, range)[0]] for k in range(1000)])
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
    assert train.load(3, eight)[0][0].size == (24, 24)
    with pytest.raises(ValueError, match="clips: expected an even number"):
        Moving(train=True, clips=3)
    with pytest.raises(ValueError, match="direction, frames, size: expected"):
        moving_clip(0, 0)


# Real videos


@pytest.fixture(scope="module")
def gesture5(tmp_path_factory) -> Path:
    archive = Path(os.environ.get("COMROPE_DATA") or "", "gesture5.tar")
    if not os.environ.get("COMROPE_DATA") or not archive.is_file():
        pytest.skip("COMROPE_DATA is not set, or has no gesture5.tar")
    out = tmp_path_factory.mktemp("gesture5")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return out / "gesture5"


def test_gesture5_as_it_is_distributed(gesture5):
    data = data_of(gesture5, num_classes=5)
    train, val = open_clips(data)
    assert (len(train), len(val)) == (663, 100)
    assert train.classes == ["LeftSwipe", "RightSwipe", "Stop", "ThumbsDown", "ThumbsUp"]
    assert (
        {train.target(i) for i in range(663)} == {val.target(i) for i in range(100)} == {*range(5)}
    )
    cached = CachedVideos(val)
    for index in range(len(val)):
        assert train.read(index, range).seen == train.read(index, range).said == 16
        (images, target), (kept, same) = val.load(index, eight), cached.load(index, eight)
        assert (len(images), target) == (8, same)
        assert all(np.array_equal(a, b) for a, b in zip(images, kept, strict=True))
        assert val.classes[target] in val.name(index)
        assert len({np.asarray(image).tobytes() for image in images}) > 1
