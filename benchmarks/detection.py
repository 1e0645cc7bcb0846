"""Time the training steps of a detector with every position encoding, relative to APE.

    python benchmarks/detection.py                       # the paper's: 1,024 px, two images
    python benchmarks/detection.py model.drop_path_rate=0    # one compilation for all layers
    python benchmarks/detection.py model.drop_path_rate=0 detect.graph=false  # no CUDA graph
    python benchmarks/detection.py --recipe scenes --batch 2 --rounds 3 train.device=cpu

Weights, images and boxes are random. The methods are timed in turns. A method is timed if its
features with angles at zero equal those of APE in float32, checked in the same process. A step is
forward, backward and optimizer. *Busy*: the time of its kernels on the GPU; in the rest of a step
the GPU waits for the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comrope.experiments.common.console import machine
from comrope.experiments.common.cuda_graph import replay_in_training
from comrope.experiments.common.distributed import autocast, create_accelerator
from comrope.experiments.common.files import write_text
from comrope.experiments.common.timing import allocated, make_ready, peak_above, time_in_turns
from comrope.experiments.config import Config, load_recipe
from comrope.experiments.data.boxes import BoxBatch
from comrope.experiments.studies.study import Row
from comrope.experiments.tasks.base import Step
from comrope.experiments.tasks.detection import DetectionTask
from comrope.experiments.training.optim import create_optimizer

METHODS = ("ape", "rope-mixed", "liere", "comrope-ap", "comrope-ld", "comrope-torus")
LIMIT = 1e-4  # of the relative difference of features
BOXES = 7  # per image, the average of COCO


def make_batch(config: Config, images: int) -> BoxBatch:
    size, generator = config.detect.image_size, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    count = BOXES * images
    corner, side = 0.7 * size * draw(count, 2), size * (0.05 + 0.2 * draw(count, 2))
    boxes = torch.cat((corner, corner + side), 1)
    parts = {"boxes": boxes, "labels": 1 + (config.data.num_classes * draw(count)).long()}
    if config.detect.kind == "mask":
        parts["masks"] = masks = torch.zeros(count, size, size, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
    pixels = (255 * draw(images, config.data.in_chans, size, size)).byte()
    return BoxBatch(pixels, parts, [BOXES] * images, [*range(images)], [], None)


def _images(batch: BoxBatch, device: torch.device) -> torch.Tensor:
    """Return the input of the backbone for a batch, without normalization."""
    return torch.stack(batch.on(device)[0])


def features(model: Any, batch: BoxBatch, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.backbone.plain(_images(batch, device)))


def step(
    model: nn.Module,
    task: DetectionTask,
    batch: BoxBatch,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    torch.manual_seed(0)  # the proposals for training are drawn at random
    with autocast(task.config.train.precision, device):
        loss = task.loss(model, batch, Step(0, 0, 0, device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def ready(
    config: Config, batch: BoxBatch, device: torch.device, weights: dict[str, torch.Tensor]
) -> tuple[Callable[[], None], Any]:
    """Return a training step of a model, and its initial features.

    The model gets all ``weights`` with its names; empty ``weights`` are filled with its own.
    """
    task = DetectionTask(config)
    model: Any = task.build_model().to(device)
    model.load_state_dict(weights, strict=False)
    if not weights:
        weights |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    found = features(model, batch, device)
    model.train()
    if config.train.compile:
        task.compile(model)
    if config.detect.graph and device.type == "cuda":
        with autocast(config.train.precision, device):
            replay_in_training(model.backbone.plain, _images(batch, device))
    optimizer = create_optimizer(config.optim, model, task.layer_of)
    return partial(step, model, task, batch, optimizer, device), found


def busy_ms(call: Callable[[], None], device: torch.device) -> float | None:
    """Return the sum of the times of all kernels of a call; None on a CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def measure(base: Config, methods: list[str], images: int, rounds: int) -> dict[str, Any]:
    device = create_accelerator(base.train.device).device
    batch = make_batch(base, images)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("highest")
    rows: dict[str, dict[str, Any]] = {}
    weights: dict[str, torch.Tensor] = {}
    work, wanted = {}, None
    for method in methods:
        before = allocated(device)
        config = Row(method, perturbation=0.0, finetuned=True).config(base, seed=0)
        call, found = ready(config, batch, device, weights)
        wanted = found if wanted is None else wanted
        error = float((found - wanted).norm() / wanted.norm())
        rows[method] = {"error": error, "limit": LIMIT}
        if error > LIMIT:
            print(f"{method}: features differ from {methods[0]}'s by {error:.1e}", file=sys.stderr)
            continue
        # A CUDA graph has its own memory.
        peak = None if config.detect.graph else peak_above(device, before, call)
        rows[method]["peak_gib"] = None if peak is None else peak / 2**30
        work[method] = make_ready(call, device, rounds=rounds)
        rows[method]["busy_ms"] = busy_ms(call, device)
    for method, times in time_in_turns(work, device).items():
        rows[method] |= times._asdict()
    first = rows[methods[0]]
    for row in rows.values():
        if "ms" in row and "ms" in first:
            row["of_first"] = row["ms"] / first["ms"]
            row["peak_of_first"] = row["peak_gib"] and row["peak_gib"] / first["peak_gib"]
            row["busy_of_first"] = row["busy_ms"] and row["busy_ms"] / first["busy_ms"]
    return {"images": images, "rows": rows, "machine": machine(device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="coco")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("fields", nargs="*", help="such as train.compile=true")
    args = parser.parse_intermixed_args()
    base = load_recipe(args.recipe).with_overrides(args.fields)
    results = measure(base, args.methods.split(","), args.batch, args.rounds)
    results["command"] = " ".join(["python", "benchmarks/detection.py", *sys.argv[1:]])
    for method, row in results["rows"].items():
        if "ms" in row:
            peak = "" if row["peak_gib"] is None else f"  {row['peak_gib']:6.2f} GiB"
            busy = ""
            if row["busy_ms"] is not None:
                busy = f"  busy {row['busy_ms']:8.1f} ms  {row['busy_of_first']:5.2f}"
            print(f"{method:16} {row['ms']:8.1f} ms  {row['of_first']:5.2f}{busy}{peak}")
    if args.out is not None:
        write_text(args.out, json.dumps(results, indent=1) + "\n")
    sys.exit(any("ms" not in row for row in results["rows"].values()))


if __name__ == "__main__":
    main()
