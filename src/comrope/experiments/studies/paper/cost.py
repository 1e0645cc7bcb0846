"""Tab. 5 and Tab. 7: counts of parameters, and times of steps on this machine."""

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
from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.common.parity import TOLERANCE, parity_error
from comrope.experiments.common.timing import (
    cross_entropy_backward,
    inference_step,
    seconds,
    training_step,
)
from comrope.experiments.config import Config, commutes, load_recipe
from comrope.experiments.studies.study import Results, Study, method_label
from comrope.experiments.studies.tables import describe_run_of, markdown_table
from comrope.experiments.tasks import task_of
from comrope.models import ViT

__all__ = ["STUDY", "count_parameters", "measure"]

# Methods and block sizes of the paper's tables, and ours.
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
OTHER_BLOCK_SIZE = 8  # of methods that a command names
# The paper's formulas, with tokens n, width d, layers L, axes N and block size b.
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
    """Return the parameters that each position encoding adds to the paper's ViT-B/16 (Tab. 5)."""
    base = load_recipe("imagenet")
    found = []
    for method, block in ROWS[1:]:
        with torch.device("meta"):  # shapes of weights without values
            model: Any = task_of(_config(base, method, block)).build_model()
        formula = FORMULAS.get(method)
        tokens = model.token_positions().shape[0] - model.num_prefix_tokens
        sizes = (tokens, model.num_features, len(model.blocks), model.num_axes, block)
        found.append(
            {
                "method": method,
                "block_size": block,
                "parameters": model.position_parameters(),
                "formula": formula and formula[0],
                "expected": formula and formula[1](*sizes),
            }
        )
    return found


def measure(base: Config, *, methods: Sequence[str] = (), progress: bool = True) -> Results:
    """Time a training step and inference of every method on this machine.

    The methods are timed in turns, so that a change of the machine's speed affects all. Compiled
    ones are timed one after the other, because many compiled models in one process slow each other.
    """
    accelerator = create_accelerator(base.train.device)
    batch = min(base.train.batch_size, BATCH.get(accelerator.device.type, 128))
    others = ((method, OTHER_BLOCK_SIZE) for method in methods if method not in dict(ROWS))
    chosen = [r for r in (*ROWS, *others) if not methods or r[0] in (*methods, "rope")]
    groups = [[row] for row in chosen] if base.train.compile else [chosen]
    times: list[dict[str, Any]] = []
    with progress_bar(progress, "methods") as bar:
        task = bar.add_task("timing", total=len(chosen), note="")
        for group in groups:
            torch.compiler.reset()
            times += _time_in_turns(base, accelerator, group, batch)
            bar.advance(task, len(group))
    vanilla = next(row for row in times if row["method"] == "rope")
    for key in ("train", "inference"):
        unit = vanilla[f"{key}_ms"]
        for row in times:
            row[f"{key}_ratio"] = row[f"{key}_ms"] / unit
    draws = "one draw a sample, LieRE one a batch"
    if base.train.perturbation_per == "batch":
        draws = "one draw a batch"
    compiled = ", compiled" if base.train.compile else ""
    return {
        "counted_for": "ViT-B/16 at 224 px",
        "parameters": count_parameters(),
        "times": times,
        "batch": batch,
        "timed": f"{base.model.name}, batch {batch}, precision {base.train.precision}{compiled}; "
        f"perturbed positions in training ({draws})",
    }


def _time_in_turns(
    base: Config, accelerator: Any, group: list[tuple[str, int]], batch: int
) -> list[dict[str, Any]]:
    device, size = accelerator.device, task_of(base).training_view.resolution
    images = torch.randn(batch, base.data.in_chans, size, size, device=device)
    targets = torch.randint(base.data.num_classes, (batch,), device=device)
    cast = partial(autocast, base.train.precision, device)
    found: list[dict[str, Any]] = []
    work: list[dict[str, Callable[[], Any]]] = []
    for method, block in group:
        task = task_of(_config(base, method, block))
        model: Any = task.build_model().to(device)
        error = parity_error(model, images[:2])
        if error is not None and not error < TOLERANCE:
            raise RuntimeError(f"{method}: parity error {error:.1e}; no speed is reported")
        if base.train.compile:
            task.compile(model)
        positions = _positions(base, method, model, batch)
        backward = partial(cross_entropy_backward, targets)
        found.append({"method": method, "block_size": block, "error": error})
        work.append(
            {
                "train": partial(training_step, cast, model, (images, positions), backward),
                "inference": partial(inference_step, cast, model, (images,)),
            }
        )
    times: list[dict[str, list[float]]] = [{"train": [], "inference": []} for _ in group]
    for turn in range(WARM_UP + ROUNDS):
        for steps, samples in zip(work, times, strict=True):
            for key, step in steps.items():
                took = seconds(device, step)
                if turn >= WARM_UP:
                    samples[key].append(took)
    for row, samples in zip(found, times, strict=True):
        row.update({f"{key}_ms": 1e3 * statistics.median(some) for key, some in samples.items()})
    return found


def _config(base: Config, method: str, block: int) -> Config:
    return base.with_overrides({"model.position": method, "model.block_size": block})


def _positions(base: Config, method: str, model: ViT, batch: int) -> Tensor:
    grid = model.train_grid
    per_sample = base.train.perturbation_per == "sample" and commutes(method)
    place = coordinates.grid(grid, device=model.patches.proj.weight.device)
    sizes = [1 / size for size in grid]
    return coordinates.perturb(place, sizes, 1.0, batch_size=batch if per_sample else None)


def table(results: Results) -> str:
    return f"{parameters_table(results)}\n{times_table(results)}"


def parameters_table(results: Results) -> str:
    lines = [
        [
            method_label(row["method"]),
            str(row["block_size"]) if row["method"] != "ape" else "–",
            f"{row['parameters']:,}",
            row["formula"] or "–",
            "–" if row["expected"] is None else f"{row['expected']:,}",
        ]
        for row in results["parameters"]
    ]
    header = ["method", "block", "counted", "paper's formula", "its value"]
    return f"Extra parameters of {results['counted_for']}.\n\n{markdown_table(header, lines)}"


def times_table(results: Results) -> str:
    paper = results["paper"]["cost"]
    lines = [
        [
            method_label(row["method"]),
            str(row["block_size"]) if row["error"] is not None else "–",
            f"{row['train_ms']:.1f}",
            f"{row['train_ratio']:.2f}",
            f"{row['inference_ms']:.1f}",
            f"{row['inference_ratio']:.2f}",
            f"{row['error']:.0e}" if row["error"] is not None else "–",
            _paper_ratio(paper["minutes_per_epoch"], row),
            _paper_ratio(paper["seconds_of_validation"], row),
        ]
        for row in results["times"]
    ]
    header = ["method", "block", "train step, ms", "÷ vanilla", "inference, ms", "÷ vanilla"]
    header += ["error", "paper: train", "paper: inference"]
    return (
        f"Time of {results['timed']}; medians. *Error*: relative error of the logits against the "
        "block-wise matrix exponential in float32, checked before in the same run.\n"
        f"The paper's ratios are of other hardware ({paper['data']}).\n\n"
        + markdown_table(header, lines)
    )


def _paper_ratio(times: dict[str, dict[str, float]], row: dict[str, Any]) -> str:
    found = times.get(row["method"], {}).get(str(row["block_size"]))
    return "–" if found is None else f"{found / times['rope']['2']:.2f}"


def figure(results: Results) -> Any:
    """Draw the time of a training step and of inference, in times of vanilla RoPE."""
    drawing, axes = new_figure(2, width=6.0)
    times = results["times"]
    names = [
        method_label(row["method"], short=True)
        + (f", b = {row['block_size']}" if row["error"] is not None else "")
        for row in times
    ]
    colors = [style_of(row["method"])["color"] for row in times]
    for axis, key, what in zip(
        axes[0], ("train_ratio", "inference_ratio"), ("a training step", "inference"), strict=True
    ):
        values = [row[key] for row in times]
        axis.barh(names, values, color=colors)
        axis.bar_label(axis.containers[0], fmt="%.2f", padding=3, fontsize=9)
        axis.axvline(1, color="0.3", linewidth=1)
        axis.invert_yaxis()
        axis.set(xlabel=f"time of {what}, vanilla RoPE = 1", xlim=(0, 1.15 * max(values)))
    axes[0, 1].set_yticklabels([])
    drawing.suptitle(f"{results['timed']}, {results['machine']['device']}", fontsize=10)
    return drawing


STUDY = Study(
    name="cost",
    title="Parameters and time",
    where="Tab. 5 and 7",
    task="images",
    run=measure,
    table=table,
    figure=figure,
    parts={
        "parameters": parameters_table,
        "times": lambda results: times_table(results) + describe_run_of(results),
    },
)
