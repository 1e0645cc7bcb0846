"""Measure the speed of loading and of training separately, to see whether training waits for data.

    python benchmarks/loader.py gesture5 --data PATH
    python benchmarks/loader.py ucf101 --data PATH --clips 1000 data.workers=16 data.cache=false

Loading reads ``--clips`` images or clips, in several epochs if there are fewer. It reports the
memory of all processes after a tenth, a half and all of them. Training repeats one batch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import psutil

from comrope.experiments.common.console import machine
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.timing import seconds
from comrope.experiments.config import Config, load_recipe
from comrope.experiments.data.batches import Batch
from comrope.experiments.data.workers import start
from comrope.experiments.tasks import task_of
from comrope.experiments.training.metrics import Meter
from comrope.experiments.training.train import RunFolder
from comrope.experiments.training.trainer import Trainer

STEPS = 10


def memory() -> float:
    """Return the MiB of this process and its loading processes; shared pages count once."""
    own = psutil.Process()
    return sum(p.memory_full_info().pss for p in (own, *own.children(recursive=True))) / 2**20


def load(run: Trainer, clips: int) -> tuple[Batch, dict[str, Any]]:
    """Return a batch, and the speed of loading."""
    run.stream = stream = start(run.task.training_loader(run.source, run.batches))
    first = next(stream)  # processes have started
    size = len(first.targets)
    batches = max(10, -(-clips // size))
    used, begun, unreadable = [], time.perf_counter(), len(first.unreadable)
    for number in range(batches):
        unreadable += len(next(stream).unreadable)
        if number in (batches // 10, batches // 2, batches - 1):
            used.append(round(memory()))
    took = time.perf_counter() - begun
    return first, {
        "clips": batches * size,
        "clips_per_second": batches * size / took,
        "memory_mib": used,
        "unreadable": unreadable,
    }


def train(run: Trainer, batch: Batch) -> float:
    """Return the clips per second of training without waiting for data."""
    meter, stream = Meter(), itertools.repeat(batch)
    device = run.accelerator.device
    for _ in range(3):
        run.one_step(stream, meter)

    def steps() -> None:
        for _ in range(STEPS):
            run.one_step(stream, meter)

    parts = run.config.train.accumulate
    return STEPS * parts * len(batch.targets) / seconds(device, steps)


def measure(config: Config, clips: int) -> dict[str, Any]:
    accelerator = create_accelerator(config.train.device)
    config = config.with_overrides({"train.epochs": 10**6})  # never the last batch
    task, sink = task_of(config), RunFolder(Path("unused"))
    with contextlib.closing(Trainer(task, accelerator, sink)) as run:
        batch, loading = load(run, clips)
        training = train(run, batch)
    each = max(1, config.data.frames)
    return {
        **loading,
        "workers": config.data.workers,
        "cache": config.data.cache,
        "loaded_frames_per_second": each * loading["clips_per_second"],
        "trained_frames_per_second": each * training,
        "machine": machine(accelerator.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipe")
    parser.add_argument("--data")
    parser.add_argument("--clips", type=int, default=1000)
    parser.add_argument("fields", nargs="*", help="such as data.workers=16")
    args = parser.parse_intermixed_args()
    config = load_recipe(args.recipe).with_overrides(args.fields)
    if args.data:
        config = config.with_overrides({"data.root": args.data})
    print(json.dumps(measure(config, args.clips), indent=1))


if __name__ == "__main__":
    main()
