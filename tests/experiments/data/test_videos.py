"""Videos: exactly the chosen frames, or what is wrong with a file or a data set."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from helpers import raises_for
from PIL import Image
from support.videos import (
    FRAMES,
    copied,
    eight,
    in_folders,
    numbers_of,
    open_videos,
    source_of,
    write_video,
)
from torch.utils.data import DataLoader, Dataset

from comrope.experiments.common.errors import UserError
from comrope.experiments.data import clips
from comrope.experiments.data.clips import frame_numbers
from comrope.experiments.data.videos import CachedVideos, open_clips

cv2 = pytest.importorskip("cv2")


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.avi", "MJPG"), ("b.mp4", "mp4v"), ("c.avi", "XVID"), ("d.mkv", "mp4v"), ("e.MOV", "mp4v")],
)
def test_exactly_the_chosen_frames_are_loaded(name, codec, tmp_path):
    decoded = source_of(write_video(tmp_path / name, codec=codec))
    for source in (decoded, CachedVideos(decoded)):
        assert numbers_of(source.load(0, range)[0]) == list(range(FRAMES))
        for seed in range(20):
            rng = random.Random(seed)
            chosen = frame_numbers(FRAMES, 1 + seed, span=rng.uniform(0.1, 1), rng=rng)
            images, target = source.load(0, lambda _, numbers=chosen: numbers)
            assert numbers_of(images) == chosen
            assert {(image.dtype.name, image.shape) for image in images} == {("uint8", (48, 64, 3))}
            assert target == 0


def test_pixels_are_red_first_or_grey(tmp_path):
    path = tmp_path / "red.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 25, (32, 32))
    for _ in range(3):
        writer.write(np.full((32, 32, 3), (0, 0, 255), np.uint8))  # OpenCV's red
    writer.release()
    red, green, blue = source_of(path).load(0, eight)[0][0].mean((0, 1))
    assert red > 240
    assert max(green, blue) < 15
    (grey, *_), _ = source_of(path, mode="L").load(0, eight)
    assert (grey.dtype.name, grey.shape) == ("uint8", (32, 32))
    assert grey.mean() == pytest.approx(76, abs=4)


def test_a_header_that_is_a_little_wrong_is_a_choice_from_the_existing_frames(tmp_path):
    whole = write_video(tmp_path / "whole.avi").read_bytes()
    found = {}
    for size in range(len(whole) * 6 // 10, len(whole), len(whole) // 150):
        path = tmp_path / f"{size}.avi"
        path.write_bytes(whole[:size])
        reading = source_of(path).read(0, range)
        found.setdefault((reading.claimed, reading.seen), path)
    asked = []

    def ends(count: int) -> list[int]:
        asked.append(count)
        return [0, count - 2, count - 1]

    assert {(FRAMES, n) for n in (20, 35, 36, 39)} <= set(found)
    for (claimed, seen), path in found.items():
        for source in (source_of(path), CachedVideos(source_of(path))):
            asked.clear()
            if claimed - seen > 4:
                with pytest.raises(ValueError, match=rf"{seen} of {FRAMES}"):
                    source.load(0, ends)
                # The chosen frames exist; those after them do not matter.
                assert numbers_of(source.load(0, lambda _: [3, 9])[0]) == [3, 9]
            else:
                images = source.load(0, ends)[0]
                assert len(images) == 3
                assert numbers_of(images[:2]) == [0, seen - 2]  # the last one may be cut
                assert asked == [claimed, seen][: 1 + (claimed != seen)]


def test_a_video_of_one_frame_is_no_clip_whatever_its_header_claims(tmp_path):
    whole = write_video(tmp_path / "three.avi", 3).read_bytes()
    path, found = tmp_path / "cut.avi", 0
    for size in range(len(whole) // 2, len(whole), 50):
        path.write_bytes(whole[:size])
        with contextlib.suppress(ValueError):
            if source_of(path).read(0, range)[::3] == (3, 1):
                with pytest.raises(ValueError, match="one frame"):
                    source_of(path).load(0, eight)
                found += 1
    assert found


def hostile(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return files that are no videos by their kind, and what their errors name."""
    avi, mp4 = write_video(folder / "whole.avi"), write_video(folder / "whole.mp4", codec="mp4v")
    xvid = write_video(folder / "xvid.avi", codec="XVID")
    unreadable = "OpenCV"
    found = {
        "one frame": (write_video(folder / "one.avi", 1), "one frame"),
        "missing": (folder / "missing.avi", "no such"),
        "folder": (folder / "folder.avi", "not a file"),
        "pipe": (folder / "pipe.avi", "not a file"),
        "empty": (folder / "empty.avi", "empty"),
        "text": (folder / "text.avi", unreadable),
        "numbered text": (folder / "img_0001.avi", unreadable),
        "noise": (folder / "noise.mp4", unreadable),
        "sound": (folder / "sound.avi", unreadable),
        "picture": (folder / "picture.avi", "one frame"),
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
            found[path.name] = path, rf"{unreadable}|\d+ of {FRAMES}"
    return found


def test_files_that_are_no_videos_raise_each_time_and_harm_nothing_else(tmp_path):
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


def test_files_that_are_no_videos_print_nothing(tmp_path):
    hostile(tmp_path)
    code = f"""
from pathlib import Path
from comrope.experiments.data.videos import _decode
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
                with pytest.raises(ValueError):  # noqa: PT011 (each for its own reason)
                    one.load(1, eight)
        return psutil.Process().memory_info().rss

    before = load(20)
    assert load(200) - before < 8 * 2**20


class Loaded(Dataset):
    def __init__(self, source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> list[int]:
        return numbers_of(self.source.load(index, eight)[0])


def test_forked_processes_load_after_this_one_did(tmp_path):
    paths = [write_video(tmp_path / f"{n}.mp4", n, "mp4v") for n in (10, 20, 30, 40)]
    source = source_of(*paths)
    cv2.setNumThreads(2)
    source_of(*paths).load(0, eight)
    assert cv2.getNumThreads() == 1  # what a fork leaves behind is waited for
    cv2.resize(np.zeros((2000, 2000, 3), np.uint8), (1000, 1000))
    for loaded in (Loaded(source), Loaded(CachedVideos(source))):
        loader = DataLoader(
            loaded, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
        )
        assert list(loader) == [eight(n) for n in (10, 20, 30, 40)]


# Data sets


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", ["ucf101", "moving"])
def test_training_and_validation_clips(ucf, name, mode, monkeypatch):
    monkeypatch.setattr(clips, "MOVING_CLIPS", {"train": 100, "val": 50})
    train, validation = open_videos(ucf, name=name, mode=mode)
    (alone,) = open_videos(ucf, name=name, mode=mode, train=False)
    assert len(train) > len(validation) == len(alone)
    assert [alone.name(i) for i in range(len(alone))] == [
        validation.name(i) for i in range(len(alone))
    ]
    shape = {"L": (), "RGB": (3,)}[mode]
    for source in (train, validation, alone, CachedVideos(train)):
        frames, target = source.load(len(source) - 1, eight)
        assert {frame.shape[2:] for frame in frames} == {shape}
        assert (len(frames), target in (0, 1)) == (8, True)


def test_cached_videos_have_the_names_and_classes_of_the_source(ucf):
    (source,) = open_videos(ucf, train=False)
    cached = CachedVideos(source)
    assert (len(cached), cached.classes) == (2, ["Emu", "Ant"])
    for index in range(2):
        assert (cached.name(index), cached.target(index)) == (
            source.name(index), source.target(index)
        )  # fmt: skip


def test_validation_folders_are_numbered_as_training_folders(ucf, tmp_path):
    root = in_folders(ucf, tmp_path)
    for train in (True, False):
        validation = open_videos(root, ("train", "val"), train=train)[-1]
        assert validation.classes == ["Ant", "Emu"]
        assert {validation.target(index) for index in range(len(validation))} == {1}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"name": "kinetics"}, "data.name"),
        ({"num_classes": 101}, "data.num_classes"),
        ({"name": "moving", "num_classes": 5}, "data.num_classes"),
        ({"root": None}, "data.root"),
        ({"root": "/no/such/place"}, "data.root"),
        ({"splits": ("train", "testlist07")}, "data.root"),
    ],
)
def test_data_sets_that_do_not_exist_are_refused(ucf, changes, argument):
    usual = {"name": "ucf101", "root": str(ucf), "splits": ("train", "val"), "num_classes": 2}
    with raises_for(argument, UserError):
        open_clips(**{**usual, **changes})


def test_splits_with_videos_in_common_are_refused(ucf, tmp_path):
    root = copied(ucf, tmp_path)
    (root / "splits" / "testlist01.txt").write_text("Ant/v_Ant_0.avi\nAnt/v_Ant_2.avi\n")
    with raises_for("data.val_split", UserError) as caught:
        open_videos(root)
    assert "v_Ant_0.avi" in str(caught.value)
    assert len(open_videos(root, train=False)[0]) == 2


def test_missing_videos_stop_a_run_or_are_skipped(ucf, tmp_path):
    root = copied(ucf, tmp_path)
    with (root / "splits" / "testlist01.txt").open("a") as file:
        file.write("Emu/v_gone.avi\n")
    with raises_for("data.root", UserError) as caught:
        open_videos(root)
    assert "v_gone.avi" in str(caught.value)
    source = open_videos(root, skip=True)[1]
    assert len(source) == 3
    assert source.name(2).endswith("v_gone.avi")
    with pytest.raises(FileNotFoundError):
        source.load(2, eight)


def test_opencv_is_required_for_videos_only(ucf, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with raises_for("data.name", UserError) as caught:
        open_videos(ucf)
    assert "comrope[video]" in str(caught.value)
    assert open_videos(ucf, name="moving")


def test_gesture5_as_it_is_distributed(gesture5):
    train, validation = open_videos(gesture5, num_classes=5)
    assert (len(train), len(validation)) == (663, 100)
    assert train.classes == ["LeftSwipe", "RightSwipe", "Stop", "ThumbsDown", "ThumbsUp"]
    for source in (train, validation):
        assert {source.target(index) for index in range(len(source))} == {*range(5)}
    cached = CachedVideos(validation)
    for index in range(len(validation)):
        reading = train.read(index, range)
        assert reading.seen == reading.claimed == 16
        (images, target), (kept, same) = validation.load(index, eight), cached.load(index, eight)
        assert (len(images), target) == (8, same)
        assert all(np.array_equal(a, b) for a, b in zip(images, kept, strict=True))
        assert validation.classes[target] in validation.name(index)
        assert len({image.tobytes() for image in images}) > 1
