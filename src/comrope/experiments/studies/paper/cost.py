"""Tab. 5 and Tab. 7 from the live code: parameters counted, steps timed side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comrope import positions as coordinates
from comrope.experiments.common.console import progress_bar
from comrope.experiments.common.distributed import autocast, create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.parity import TOLERANCE, parity_error
from comrope.experiments.common.timing import (
    cross_entropy_backward,
    inference_step,
    seconds,
    training_step,
)
from comrope.experiments.config import Config, load_recipe
from comrope.experiments.tasks.views import resolution_of
from comrope.experiments.training.evaluate import build_model, compile_blocks
from comrope.models import ViT

__all__ = ["count_parameters", "measure"]

# As the paper's tables have them, and ours besides.
ROWS = (
    ("none", 8),
    ("ape", 8),
    ("rope", 2),
    ("rope-mixed", 2),
    ("liere", 8),
    ("comrope-ld", 4),
    ("comrope-ap", 4),
    ("comrope-ld", 8),
    ("comrope-ap", 8),
    ("comrope-torus", 8),
)
FORMULAS = {
    "ape": ("n d", lambda n, d, layers, axes, b: n * d),
    "rope": ("0", lambda n, d, layers, axes, b: 0),
    "liere": ("L N d b", lambda n, d, layers, axes, b: layers * axes * d * b),
    "comrope-ap": ("L d b", lambda n, d, layers, axes, b: layers * d * b),
    "comrope-ld": (
        "L d (b + N / b)",
        lambda n, d, layers, axes, b: layers * d * b + layers * d * axes // b,
    ),
}
WARM_UP, ROUNDS = 3, 12
BATCH = {"cpu": 16, "cuda": 128}


def count_parameters() -> list[dict[str, Any]]:
    """The parameters that a position encoding adds to the paper's ViT-B/16 (Tab. 5)."""
    base = load_recipe("imagenet")
    rows = []
    for method, block in ROWS[1:]:
        model = build_model(_config(base, method, block))
        formula = FORMULAS.get(method)
        tokens = model.token_positions().shape[0] - model.num_prefix_tokens
        sizes = (tokens, model.num_features, len(model.blocks), model.num_axes, block)
        rows.append(
            {
                "method": method,
                "block_size": block,
                "parameters": model.position_parameters(),
                "formula": formula and formula[0],
                "expected": formula and formula[1](*sizes),
            }
        )
    return rows


def measure(base: Config, *, methods: Sequence[str] = (), progress: bool = True) -> dict[str, Any]:
    """Time a training step and inference of every method on this machine.

    The methods take turns, so that a machine that slows down slows all of them. Compiled ones come
    one after the other: what was compiled for many models in one process is slow to look up.
    """
    if frames := base.data.frames:
        raise UserError(f"data.frames: the cost is that of images; expected 0, got {frames}")
    accelerator = create_accelerator(base.train.device)
    batch = min(base.train.batch_size, BATCH.get(accelerator.device.type, 128))
    chosen = [row for row in ROWS if not methods or row[0] in (*methods, "rope")]
    groups = [[row] for row in chosen] if base.train.compile else [chosen]
    rows: list[dict[str, Any]] = []
    with progress_bar(progress, "methods") as bar:
        task = bar.add_task("timing", total=len(chosen), note="")
        for group in groups:
            torch.compiler.reset()
            rows += _time_in_turns(base, accelerator, group, batch)
            bar.advance(task, len(group))
    vanilla = next(row for row in rows if row["method"] == "rope")
    for key in ("train", "inference"):
        unit = vanilla[f"{key}_ms"]
        for row in rows:
            row[f"{key}_ratio"] = row[f"{key}_ms"] / unit
    noise = "one draw a sample, LieRE one a batch"
    if base.train.perturbation_per == "batch":
        noise = "one draw a batch"
    compiled = ", compiled" if base.train.compile else ""
    return {
        "counted_for": "ViT-B/16 at 224 px",
        "parameters": count_parameters(),
        "times": rows,
        "batch": batch,
        "timed": f"{base.model.name}, batch {batch}, precision {base.train.precision}{compiled}; "
        f"perturbed positions in training ({noise})",
    }


def _time_in_turns(
    base: Config, accelerator: Any, group: list[tuple[str, int]], batch: int
) -> list[dict[str, Any]]:
    device, size = accelerator.device, resolution_of(base)[0]
    images = torch.randn(batch, base.data.in_chans, size, size, device=device)
    targets = torch.randint(base.data.num_classes, (batch,), device=device)
    cast = partial(autocast, base.train.precision, device)
    rows: list[dict[str, Any]] = []
    work: list[dict[str, Callable[[], Any]]] = []
    for method, block in group:
        model = build_model(_config(base, method, block)).to(device)
        error = parity_error(model, images[:2])
        if error is not None and not error < TOLERANCE:
            raise RuntimeError(f"{method}: parity error {error:.1e}; no speed is reported")
        if base.train.compile:
            compile_blocks(model)
        positions = _positions(base, method, model, batch)
        backward = partial(cross_entropy_backward, targets)
        rows.append({"method": method, "block_size": block, "error": error})
        work.append(
            {
                "train": partial(training_step, cast, model, (images, positions), backward),
                "inference": partial(inference_step, cast, model, (images,)),
            }
        )
    times: list[dict[str, list[float]]] = [{"train": [], "inference": []} for _ in group]
    for turn in range(WARM_UP + ROUNDS):
        for steps, found in zip(work, times, strict=True):
            for key, step in steps.items():
                took = seconds(device, step)
                if turn >= WARM_UP:
                    found[key].append(took)
    for row, found in zip(rows, times, strict=True):
        row.update({f"{key}_ms": 1e3 * statistics.median(some) for key, some in found.items()})
    return rows


def _config(base: Config, method: str, block: int) -> Config:
    return base.with_overrides({"model.position": method, "model.block_size": block})


def _positions(base: Config, method: str, model: ViT, batch: int) -> Tensor:
    grid = model.train_grid
    per_sample = base.train.perturbation_per == "sample" and method != "liere"
    place = coordinates.grid(grid, device=model.patches.proj.weight.device)
    sizes = [1 / size for size in grid]
    return coordinates.perturb(place, sizes, 1.0, batch_size=batch if per_sample else None)
