"""Decoding: exactly the frames that were chosen, or what is wrong with the file."""

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
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.clips import frame_numbers
from comrope.experiments.data.videos import CachedVideos, open_clips
from experiments.videos import FRAMES, data_of, eight, numbers_of, source_of, write_video

cv2 = pytest.importorskip("cv2")


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
        assert {(image.dtype.name, image.shape) for image in images} == {("uint8", (48, 64, 3))}
        assert target == 0


def test_colours_are_red_first_and_modes_as_asked(tmp_path):
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
                with pytest.raises(ValueError):  # noqa: PT011 (each says something else)
                    one.load(1, eight)
        return psutil.Process().memory_info().rss

    before = load(20)
    assert load(200) - before < 8 * 2**20


def test_an_error_that_is_kept_says_the_same_each_time(tmp_path):
    cached = CachedVideos(source_of(tmp_path / "missing.avi"))
    depths = []
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^no such file$") as caught:
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
        assert len({image.tobytes() for image in images}) > 1
