"""Loading processes: what they load, how many there are, and that none is left."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from support.images import (
    dataset_of,
    evaluation,
    make_folder,
    open_folder,
    shards_of,
    spoil,
    tar_of,
    training,
)

from comrope.experiments.data import workers
from comrope.experiments.data.batches import Batch, TrainBatches, Validation
from comrope.experiments.data.clips import Clips, Moving
from comrope.experiments.data.datasets import ClipDataset, collate_images
from comrope.experiments.data.holdout import held_out
from comrope.experiments.data.images import CachedImages, Digits
from comrope.experiments.data.videos import CachedVideos, Videos
from comrope.experiments.data.workers import create_loader, create_pool, end, start

pytestmark = [
    pytest.mark.usefixtures("server"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # timm's tar
]
SOURCES = ("digits", "folder", "cached folder", "cached grey folder", "tar", "cached tar", "shards",
           "held out", "moving", "ucf101", "cached ucf101")  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> dict[str, Path]:
    """The same images, one of them spoilt, in every layout."""
    roots = {name: tmp_path_factory.mktemp(name) for name in ("folder", "tar", "shards")}
    make_folder(roots["folder"])
    spoil(roots["folder"], "val")
    tar_of(roots["folder"], roots["tar"])
    shards_of(roots["folder"], roots["shards"])
    return roots


@pytest.fixture(params=SOURCES)
def source(request, packed):
    """Every source that loading processes may get."""
    name, layout = request.param, request.param.split()[-1]
    if name == "digits":
        return Digits(train=False)
    if name == "moving":
        return Moving(train=False, mode="L")
    if name == "held out":
        return held_out(open_folder(packed["folder"], ["val"])[0], 0.5)[0]
    if layout == "ucf101":
        videos = Videos(str(request.getfixturevalue("ucf")), "train")
        return CachedVideos(videos) if "cached" in name else videos
    kind = "shards" if layout == "shards" else "folder"
    mode = "L" if "grey" in name else "RGB"
    (found,) = open_folder(packed[layout], ["val"], name=kind, mode=mode)
    return CachedImages(found) if "cached" in name else found


class View(NamedTuple):
    """How images or clips are presented."""

    side: int
    frames: int = 4
    span: float = 1.0

    @property
    def size(self) -> int:
        return self.side**2 * self.frames


class Presented:
    """From a view to the samples of a source in it: a function that can be sent."""

    def __init__(self, source) -> None:
        self.source = source
        mode = getattr(source, "mode", None) or getattr(source.source, "mode", "RGB")
        self.channels = 1 if mode == "L" else 3

    def __call__(self, view: View | None):
        side = 12 if view is None else view.side
        transform = (training if view is None else evaluation)(self.channels, side)
        options = {"channels": self.channels, "num_classes": 10, "skip": True}
        options["training"] = view is None
        if not isinstance(self.source, Clips):
            return dataset_of(self.source, transform, **options)
        seen = view or View(12)
        options |= {"frames": seen.frames, "span": seen.span, "random_frames": view is None}
        return ClipDataset(self.source, transform, seed=0, **options)


def everything(source, processes: int) -> list[Batch]:
    """Return two training batches and the samples in three views, the second one given up."""
    presented = Presented(source)
    keys = TrainBatches(len(source), batch_size=2, epochs=2, seed=0)
    stream = start(
        create_loader(presented(None), keys, collate_images, workers=processes, pin_memory=False)
    )
    found = [next(stream) for _ in range(2)]
    end(stream)
    views = (View(12), View(16), View(12, 2, 0.5))
    validation = Validation(
        source, presented, collate_images, training_view=views[0], batch_size=8, workers=processes
    )
    for number, view in enumerate(views):
        batches = validation.batches(view)
        found += [next(batches)] if number == 1 else batches
    validation.close()
    return found


def test_processes_load_what_this_one_does(source):
    expected, found = everything(source, 0), everything(source, 2)
    assert len(found) == len(expected) > 4
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.targets, theirs.targets)
        assert ours[2:] == theirs[2:]


def test_every_source_can_be_sent_even_after_use(source):
    arguments = (range,) if isinstance(source, Clips) else ()

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
    if hasattr(source, "cache"):
        assert len(sent) < sum(len(repr(item)) for item in before) / 10


def test_there_are_at_most_as_many_processes_as_processors():
    def processes(wanted: int) -> int:
        loader = create_loader([], [], list, workers=wanted, pin_memory=False, persistent=True)
        return loader.num_workers

    assert (processes(0), processes(1), processes(10**6)) == (0, 1, os.cpu_count())


def test_signals_wait_until_processes_have_started():
    survived = []

    def interrupted() -> None:
        with workers.signals_delayed():
            signal.raise_signal(signal.SIGINT)
            survived.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert survived


class Waiting:
    """A data set whose samples never come."""

    def __getitem__(self, key):
        time.sleep(1000)


def is_pending(pid: int, number: int) -> bool:
    """Whether a process on Linux has not handled a signal yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("ShdPnd"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_signal_to_all_processes_of_a_job_ends_no_loading_process():
    """The training process still needs batches to finish its step; it ends them itself."""
    batches = start(create_loader(Waiting(), [[0], [0]], list, workers=1, pin_memory=False))
    (process,) = batches._workers
    for number in (signal.SIGINT, signal.SIGTERM)[: 1 + workers.CAN_WAIT]:
        # From another process: this one may end it.
        subprocess.run(["kill", f"-{number.value}", str(process.pid)], check=True)
    # A second SIGTERM is lost while the first is pending, as it is until the process has started.
    while workers.CAN_WAIT and is_pending(process.pid, signal.SIGTERM):
        time.sleep(0.1)
    time.sleep(0.3)
    assert process.is_alive()
    process.terminate()  # what torch does after it has waited
    process.join(60)
    assert process.exitcode == 0


def test_a_pool_is_ended_by_its_process_and_not_by_a_terminal():
    """A process that got Ctrl-C would print a traceback."""
    with create_pool(1) as pool:
        blocked = pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, []))
    assert signal.SIGINT in blocked
    assert signal.SIGTERM not in blocked


def processes_of(main: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(main.pid).children(recursive=True)


def wait_for(condition, main: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert main.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
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
        # The server, a tracker, and those that load.
        assert len(started) >= (2 + min(2, os.cpu_count() or 1) if when == "training" else 1)
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
    printed = output.read_text()
    if number == "SIGKILL":
        return
    assert main.returncode == 128 + signal.Signals[number]
    assert "Traceback" not in printed
    assert "Exception ignored" not in printed
    if when == "training":
        assert "saved" in printed
        assert len(list((folder / "checkpoints").glob("step-*"))) == 1
