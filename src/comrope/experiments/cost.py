"""Tab. 5 and Tab. 7 from the live code: parameters counted, steps timed side by side."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from comrope import positions as coordinates
from comrope.analysis import rotary_modules
from comrope.experiments.config import Config, load_recipe
from comrope.experiments.data import resolution_of
from comrope.experiments.distributed import create_accelerator
from comrope.experiments.evaluate import build_model, compile_blocks
from comrope.experiments.logs import progress_bar
from comrope.models import ViT

__all__ = ["TOLERANCE", "count_parameters", "measure", "parity_error"]

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
TOLERANCE = 1e-3  # of float32 logits after many layers
ROUNDS = 12
BATCH = {"cpu": 16, "cuda": 128}


def count_parameters() -> list[dict[str, Any]]:
    """The parameters that a position encoding adds to the paper's ViT-B/16 (Tab. 5)."""
    base = load_recipe("imagenet")
    rows = []
    for method, block in ROWS[1:]:
        model = build_model(_config(base, method, block))
        found = sum(p.numel() for m in rotary_modules(model).values() for p in m.parameters())
        if model.ape is not None:
            found += model.ape.codebook.numel()
        formula = FORMULAS.get(method)
        tokens = model.token_positions().shape[0] - model.num_prefix_tokens
        sizes = (tokens, model.num_features, len(model.blocks), model.num_axes, block)
        rows.append(
            {
                "method": method,
                "block_size": block,
                "parameters": found,
                "formula": formula and formula[0],
                "expected": formula and formula[1](*sizes),
            }
        )
    return rows


@torch.no_grad()
def parity_error(model: ViT, images: Tensor) -> float | None:
    """Of the logits against those with block-wise matrix exponentials; None without a rotation."""
    modules = rotary_modules(model).values()
    if not modules:
        return None
    found = model(images)
    backends = [module.backend for module in modules]
    for module in modules:
        module.backend = "reference"
    expected = model(images)
    for module, backend in zip(modules, backends, strict=True):
        module.backend = backend
    return float((found - expected).norm() / expected.norm())


def measure(base: Config, *, progress: bool = True) -> dict[str, Any]:
    """Time a training step and inference of every method, in turns, on this machine."""
    accelerator = create_accelerator(base.train.precision, base.train.device)
    device = accelerator.device
    size = resolution_of(base)[0]
    batch = min(base.train.batch_size, BATCH.get(device.type, 128))
    images = torch.randn(batch, base.data.in_chans, size, size, device=device)
    targets = torch.randint(base.data.num_classes, (batch,), device=device)
    torch.compiler.reset()
    rows, models = [], []
    with progress_bar(progress, "methods") as bar:
        task = bar.add_task("checking and warming up", total=len(ROWS), note="")
        for method, block in ROWS:
            model = build_model(_config(base, method, block)).to(device)
            with torch.autocast(device.type, enabled=False):
                error = parity_error(model, images[:2])
            rows.append({"method": method, "block_size": block, "error": error})
            if error is not None and not error < TOLERANCE:
                raise RuntimeError(f"{method}: parity error {error:.1e}; no speed is reported")
            if base.train.compile:
                compile_blocks(model)
            positions = _positions(base, method, model, batch)
            models.append((model, positions))
            for _ in range(3):
                _train_step(accelerator, model, images, targets, positions)
                _infer(accelerator, model, images)
            bar.advance(task)
        times: list[dict[str, list[float]]] = [{"train": [], "inference": []} for _ in ROWS]
        task = bar.add_task("timing", total=ROUNDS, note="")
        for _ in range(ROUNDS):
            for (model, positions), found in zip(models, times, strict=True):
                step = (_train_step, accelerator, model, images, targets, positions)
                found["train"].append(_seconds(device, *step))
                found["inference"].append(_seconds(device, _infer, accelerator, model, images))
            bar.advance(task)
    vanilla = [row["method"] for row in rows].index("rope")
    for row, found in zip(rows, times, strict=True):
        for key in ("train", "inference"):
            median = statistics.median(found[key])
            row[f"{key}_ms"] = 1e3 * median
            row[f"{key}_ratio"] = median / statistics.median(times[vanilla][key])
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


def _config(base: Config, method: str, block: int) -> Config:
    return base.with_overrides({"model.position": method, "model.block_size": block})


def _positions(base: Config, method: str, model: ViT, batch: int) -> Tensor:
    grid = model.train_grid
    per_sample = base.train.perturbation_per == "sample" and method != "liere"
    place = coordinates.grid(grid, device=model.patches.proj.weight.device)
    sizes = [1 / size for size in grid]
    return coordinates.perturb(place, sizes, 1.0, batch_size=batch if per_sample else None)


def _train_step(
    accelerator: Any, model: nn.Module, images: Tensor, targets: Tensor, positions: Tensor
) -> None:
    """Forward and backward, without the optimizer."""
    model.train()
    model.zero_grad(set_to_none=True)
    with accelerator.autocast():
        loss = nn.functional.cross_entropy(model(images, positions).float(), targets)
    loss.backward()


@torch.inference_mode()
def _infer(accelerator: Any, model: nn.Module, images: Tensor) -> None:
    model.eval()
    with accelerator.autocast():
        model(images)


def _seconds(device: torch.device, function: Any, *arguments: Any) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    function(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
