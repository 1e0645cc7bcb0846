"""Processes that load: what they load, how many there are, and that none is left."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from comrope.experiments.common.errors import Interrupted, UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data import workers
from comrope.experiments.data.batches import Batch, TrainBatches, Validation, train_loader
from comrope.experiments.data.images import open_sources
from comrope.experiments.data.workers import Kept, end, start
from comrope.experiments.runs.log import read_log
from comrope.experiments.tasks.views import View
from comrope.experiments.training.train import train
from comrope.experiments.training.trainer import Run
from experiments.images import config_for, make_folder, shards_of, spoil, tar_of
from experiments.runs import tiny

SOURCES = ("digits", "folder", "cached", "grey", "tar", "cached tar", "shards", "moving", "ucf101",
           "cached ucf101")  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> dict[str, Path]:
    """The same images, one of them spoilt, in every layout."""
    roots = {name: tmp_path_factory.mktemp(name) for name in ("folder", "tar", "shards")}
    make_folder(roots["folder"])
    spoil(roots["folder"], "val")
    tar_of(roots["folder"], roots["tar"])
    shards_of(roots["folder"], roots["shards"])
    return roots


def configured(name: str, packed: dict[str, Path], request, **fields):
    fields = {"data__unreadable": "skip", "data__cache": "cached" in name, **fields}
    layout = name.split()[-1]
    if layout == "digits":
        return tiny(**fields)
    if layout in ("moving", "ucf101"):
        small = {"model.name": "vit_nanovideo_patch4_12", "data.frames": 4, "train.batch_size": 2}
        if layout == "ucf101":
            small |= {"data.name": "ucf101", "data.root": str(request.getfixturevalue("ucf"))}
        named = {field.replace("__", "."): value for field, value in fields.items()}
        return load_recipe("moving").with_overrides({**small, **named})
    if name == "grey":
        fields |= {"data__cache": True, "data__in_chans": 1, "data__mean": (0.5,)}
        fields |= {"data__std": (0.5,)}
    root = packed.get(layout, packed["folder"])
    named = "shards" if layout == "shards" else "folder"
    return config_for(root, data__name=named, train__batch_size=4, **fields)


def everything(config, sources) -> list[Batch]:
    """Some batches of training, and the validation set in three views, the second one given up."""
    source, validation_source = sources
    stream = start(train_loader(config, source, TrainBatches(config, len(source))))
    found = [next(stream) for _ in range(2)]
    end(stream)
    validation = Validation(config, validation_source)
    views = [View(size, config.data.frames) for size in (12, 16, 24)]
    if config.data.frames:
        views[2] = View(12, 2, 0.5)
    for number, view in enumerate(views):
        batches = validation.batches(view)
        found += [next(batches)] if number == 1 else batches
    validation.close()
    return found


def same(ours: list[Batch], theirs: list[Batch]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) and a[2:] == b[2:]
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's open file
@pytest.mark.parametrize("name", SOURCES)
def test_processes_load_what_this_one_does(name, packed, request):
    config = configured(name, packed, request, evaluate__batch_size=8)
    sources = open_sources(config)
    expected = everything(config, sources)
    assert same(everything(config.with_overrides({"data.workers": 2}), sources), expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_can_be_sent_even_after_use(name, packed, request):
    source = open_sources(configured(name, packed, request))[1]
    arguments = (range,) if name in ("moving", "ucf101", "cached ucf101") else ()

    def contents(of) -> list[object]:
        found = []
        for index in range(len(of)):
            try:
                image, target = of.load(index, *arguments)
                images = map(np.asarray, image if isinstance(image, list) else [image])
                found.append([target, *[(i.shape, i.tobytes()) for i in images]])
            except Exception as error:
                found.append((of.name(index), str(error)))
        return found

    before = contents(source)
    sent = pickle.dumps(source)
    assert contents(pickle.loads(sent)) == before
    if name.startswith("cached"):
        assert len(sent) < sum(len(item) for item in map(repr, before)) / 10


class WhoLoads:
    """Nothing can be read of it but, in place of a name, the process that tried."""

    def __len__(self) -> int:
        return 40

    def name(self, index: int) -> str:
        return str(os.getpid())

    def load(self, index: int):
        raise ValueError("nothing here")


def test_one_set_of_processes_serves_all_views_and_ends():
    config = tiny(data__workers=2, data__unreadable="skip", evaluate__batch_size=4)
    validation = Validation(config, WhoLoads())
    seen = set()
    for size in (12, 16, 20):
        batches = validation.batches(View(size))
        for number, batch in enumerate(batches):
            seen |= {int(pid) for pid in batch.unreadable}
            if size == 16 and number == 3:
                break
    assert len(seen) == 2
    assert all(psutil.pid_exists(pid) for pid in seen)
    validation.close()
    assert not any(psutil.pid_exists(pid) for pid in seen)
    assert int(next(validation.batches(View(12))).unreadable[0]) not in seen  # it may go on
    validation.close()


def test_a_run_that_is_told_to_stop_in_evaluation_ends_its_processes(tmp_path, monkeypatch):
    started = []

    def told(run, bar, task, images):
        started.extend(run.validation.loader._iterator._workers)
        raise Interrupted("stopped")

    config = tiny(train__epochs=1, data__workers=2, evaluate__every=0)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_advance", told)
        with pytest.raises(Interrupted) as kept:  # and with it, all that was under way
            train(config, tmp_path / "run", progress=False)
    assert len(started) == 2
    assert not any(psutil.pid_exists(process.pid) for process in started), kept
    result = train(config, tmp_path / "run", progress=False)
    assert result["top1"] == train(tiny(train__epochs=1), tmp_path / "one", progress=False)["top1"]


def test_evaluations_tell_how_long_they_took(tmp_path):
    config = tiny(evaluate__every=1, evaluate__resolutions=(12, 24))
    result = train(config, tmp_path / "run", progress=False)
    assert set(result["view_seconds"]) == {"12", "24"}
    assert result["evaluation_seconds"] == pytest.approx(sum(result["view_seconds"].values()))
    (told,) = (r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "evaluation")
    assert 0 < told["seconds"] < 60


def test_pictures_are_kept_as_they_are():
    rng = np.random.default_rng(0)
    shapes = [[(2, 3, 3)], [], [(1, 1), (5, 4), (7, 2, 3)], [(9, 9)]]
    pictures = [[rng.integers(0, 256, s, dtype=np.uint8) for s in some] for some in shapes]

    def decode(index: int):
        if not pictures[index]:
            raise OSError(f"number {index}")
        return 10 * index, [Image.fromarray(p) for p in pictures[index]]

    kept = Kept(4, decode, "pictures")
    for one in (kept, pickle.loads(pickle.dumps(kept))):
        for index in (0, 2, 3):
            assert one.load(index) == (10 * index, len(pictures[index]))
            for number, expected in enumerate(pictures[index]):
                assert np.array_equal(one.picture(index, number), expected)
        with pytest.raises(ValueError, match=r"^number 1$"):
            one.load(1)


def test_more_images_than_the_memory_are_not_kept(packed, monkeypatch):
    monkeypatch.setattr(workers, "_memory", lambda: 20 * 30 * 3 * 48)
    with pytest.raises(UserError, match=r"data.cache: 48 images .* data.cache=false"):
        open_sources(config_for(packed["folder"], data__cache=True))


def test_signals_wait_until_processes_have_started():
    survived = []

    def interrupted() -> None:
        with workers._uninterrupted():
            signal.raise_signal(signal.SIGINT)
            survived.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert survived


def processes_of(main: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(main.pid).children(recursive=True)


def wait_for(condition, main: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert main.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "when"),
    [("SIGKILL", "training"), ("SIGTERM", "training"), ("SIGINT", "training"), ("SIGINT", "start")],
)
def test_nothing_is_left_of_a_run_that_is_ended(number, when, tmp_path):
    """A terminal's Ctrl-C, and the SIGTERM of a cluster's scheduler, go to all its processes."""
    folder, output = tmp_path / "run", tmp_path / "output"
    settings = (
        "model.name=vit_nano_patch4_12", "data.workers=2", "train.epochs=1000", "train.log_every=1",
        "train.checkpoint_every=100000", "evaluate.resolutions=12",
    )  # fmt: skip
    with output.open("w") as stream:
        main = subprocess.Popen(
            [sys.executable, "-m", "comrope", "train", "digits", *settings, "--out", str(folder)],
            stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    try:
        if when == "start":  # its server is still busy with imports
            wait_for(lambda: "forkserver" in str([p.cmdline() for p in processes_of(main)]), main)
        else:
            log = folder / "log.jsonl"
            wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, main)
        started = processes_of(main)
        assert len(started) >= (4 if when == "training" else 1)  # server, tracker, two that load
        if number == "SIGKILL":
            main.kill()
        else:
            os.killpg(main.pid, signal.Signals[number])
        main.wait(timeout=60)
        _, left = psutil.wait_procs(started, timeout=30)
        assert left == []
    finally:
        for process in psutil.process_iter():  # no process outlives a test that fails
            if os.getpgid(process.pid) == main.pid:
                process.kill()
    said = output.read_text()
    if number == "SIGKILL":
        return
    assert main.returncode == (143 if when == "training" else 130)
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    if when == "training":
        assert "saved; the same command goes on" in said
        assert len(list((folder / "checkpoints").glob("step-*"))) == 1
