"""Tab. 2 and its figure: six APs, AP against epochs, and what was found beside what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.figures import STYLES, new_figure, save
from comrope.experiments.config import Config
from comrope.experiments.data.batches import Key
from comrope.experiments.data.boxes import BoxSource
from comrope.experiments.runs.directory import LOG
from comrope.experiments.runs.log import read_log
from comrope.experiments.studies import LABELS
from comrope.experiments.studies.markdown import interval, label, number, rows, spread, spread_said
from comrope.experiments.studies.stats import difference
from comrope.experiments.tasks.coco_metrics import METRICS
from comrope.experiments.tasks.detection import DetectionTask
from comrope.experiments.tasks.views import usual_view

__all__ = ["by_epoch", "draw_found", "figure", "table"]

SHOWN = 3  # images of which it is shown what was found


def by_epoch(folder: Path, config: Config, result: dict[str, Any]) -> dict[str, float]:
    """AP after every epoch at which it was asked for, the last included."""
    found = {str(r["epoch"]): r["AP"] for r in read_log(folder / LOG) if r["event"] == "evaluation"}
    last = result["AP"].get(str(usual_view(config).resolution))
    return found if last is None else {**found, str(config.train.epochs): last}


def table(results: dict[str, Any]) -> str:
    cells = [cell for cell in results["cells"] if cell["finetuned"]]
    size = str(results["recipe"]["detect"]["image_size"])
    text = _begun(results) + _figures(cells, size, "figures")
    if all("masks" in run["figures"][size] for cell in cells for run in cell["runs"]):
        text += f"\nOf masks:\n\n{_figures(cells, size, 'masks')}"
    paper = results["paper"]["detection"]
    lines = [[LABELS[m], *(f"{v:.1f}" for v in values)] for m, values in paper["figures"].items()]
    other = "" if results["preset"] == "paper" else ", on another data set"
    return text + f"\nThe paper's{other} ({paper['data']}):\n\n{rows(['method', *METRICS], lines)}"


def _begun(results: dict[str, Any]) -> str:
    """What the detectors started from, and how they were trained."""
    recipe = results["recipe"]
    start = f"`{recipe['train']['start_from']}`"
    if before := results.get("pretraining"):
        start = f"{before['train']['epochs']} epochs of classification with APE"
    optim = recipe["optim"]
    return (
        f"COCO's average precision of boxes, %, after {recipe['train']['epochs']} epochs from "
        f"{start}, every method on top of its APE and from zero. Learning rate {optim['lr']:g}, of "
        f"the angles {optim['lr'] * optim['angle_lr_scale']:g}, times {optim['layer_decay']:g} a "
        "layer downwards. *Over APE*: the difference in AP, seed by seed, and its 95 % interval "
        "(Student's t). Speed and memory: of a run, beside which others may have used the GPU.\n\n"
    )


def _figures(cells: list[dict[str, Any]], size: str, kind: str) -> str:
    def values(cell: dict[str, Any], name: str) -> dict[int, Any]:
        found = {run["seed"]: run["figures"][size] for run in cell["runs"]}
        return {s: (f["masks"] if kind == "masks" else f)[name] for s, f in found.items()}

    plain = next((cell for cell in cells if cell["method"] == "ape"), None)
    header = ["method", *METRICS, "over APE", "", "images/s in training", "peak memory, GiB"]
    lines = []
    for cell in cells:
        line = [label(cell)]
        for name in METRICS:
            some = list(values(cell, name).values())
            line.append("–" if None in some else number(spread(some), 1))
        over = None
        if plain is not None and cell is not plain:
            over = difference(values(cell, "AP"), values(plain, "AP"))
        speeds = spread([run["images_per_second"] for run in cell["runs"]])
        memory = max(run["peak_memory_gib"] or 0 for run in cell["runs"])
        line += [*interval(over), f"{speeds['mean']:.0f}", f"{memory:.1f}" if memory else "–"]
        lines.append(line)
    return rows(header, lines)


def figure(results: dict[str, Any]) -> Any:
    """AP against epochs, a curve a method; and at the end, seed by seed."""
    cells = [cell for cell in results["cells"] if cell["finetuned"]]
    drawing, axes = new_figure(2, width=5.8)
    curves, ends = axes[0]
    for row, cell in enumerate(cells):
        style = STYLES[cell["method"]]
        epochs = [*cell["runs"][0]["by_epoch"]]
        found = np.array([[run["by_epoch"][epoch] for epoch in epochs] for run in cell["runs"]])
        xs, mean = [int(epoch) for epoch in epochs], found.mean(0)
        curves.plot(xs, mean, lw=1.8, ms=5, label=LABELS[cell["method"]].split(" (")[0], **style)
        spread_of_end = None
        if len(found) > 1:
            std = found.std(0, ddof=1)
            curves.fill_between(xs, mean - std, mean + std, color=style["color"], alpha=0.15, lw=0)
            spread_of_end = std[-1]
        ends.plot(found[:, -1], [row] * len(found), "|", color="0.4", markersize=9)
        ends.errorbar(mean[-1], row, xerr=spread_of_end, capsize=3, markersize=7, **style)
    curves.set(xlabel="epoch", ylabel="AP, %", title="over training")
    curves.xaxis.get_major_locator().set_params(integer=True)
    curves.legend(frameon=False, fontsize=9)
    ends.set(xlabel="AP, %", title="at the end", ylim=(len(cells) - 0.5, -0.5))
    ends.set_yticks(range(len(cells)), [LABELS[c["method"]].split(" (")[0] for c in cells])
    for axis in axes[0]:
        axis.grid(alpha=0.25)
    told = spread_said(results, "band and bar")
    drawing.suptitle(f"{results['data']}{f' ({told})' if told else ''}", fontsize=11)
    return drawing


def draw_found(model: Any, config: Config, path: Path) -> None:
    """What is in a few validation images, and below it what the model finds there."""
    accelerator = create_accelerator(config.train.device)
    task = DetectionTask(config)
    view, source = task.training_view, task.open(train=False).validation
    chosen = _shown(source)
    items = task.dataset(source, view)
    batch = task.collate([items[Key(0, index, index)] for index in chosen])
    model.to(accelerator.device)
    found, _ = task.find(model, [batch], source, view, accelerator)
    names = dict(zip(source.category_ids, source.classes, strict=True))
    drawing, axes = new_figure(len(chosen), 2, width=3.6, height=3.2)
    for column, (image, own) in enumerate(zip(batch.images, batch.image_ids, strict=True)):
        there = [a for a in source.truth["annotations"] if a["image_id"] == own]
        seen = sorted((f for f in found if f["image_id"] == own), key=lambda f: -f["score"])
        seen = seen[: len(there)]
        for axis, entries in zip(axes[:, column], (there, seen), strict=True):
            _draw_boxes(axis, image, entries, names)
    axes[0, 0].set_ylabel("what is there")
    method = LABELS[config.model.position].split(" (")[0]
    axes[1, 0].set_ylabel(f"what {method} finds:\nas many, the surest")
    save(drawing, path)


def _shown(source: BoxSource) -> list[int]:
    """Images with many kinds of things, spread over the validation set."""
    kinds: dict[int, set[int]] = {}
    for annotation in source.truth["annotations"]:
        kinds.setdefault(annotation["image_id"], set()).add(annotation["category_id"])
    numbers = [image["id"] for image in source.truth["images"]]
    parts = np.array_split(np.arange(len(numbers)), min(SHOWN, len(numbers)))
    return [max(part.tolist(), key=lambda i: len(kinds.get(numbers[i], ()))) for part in parts]


def _draw_boxes(
    axis: Any, image: torch.Tensor, entries: list[dict[str, Any]], names: dict[int, str]
) -> None:
    from matplotlib.patches import Rectangle

    colours = list(STYLES.values())[2:]
    height, width = image.shape[-2:]
    edges = (0, width, height, 0)  # boxes are told from edge to edge
    pixels = image.permute(1, 2, 0).squeeze(-1).numpy()
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=edges)
    ids = [*names]
    for entry in entries:
        left, top, width, height = entry["bbox"]
        place = ids.index(entry["category_id"])
        colour = colours[place % len(colours)]["color"]
        axis.add_patch(Rectangle((left, top), width, height, fill=False, ec=colour, lw=1.3))
        score = f" {100 * entry['score']:.0f} %" if "score" in entry else ""
        axis.annotate(
            names[entry["category_id"]] + score,
            (left, top),
            fontsize=6,
            color="white",
            va="bottom",
            bbox={"facecolor": colour, "pad": 0.6, "lw": 0},
        )
    axis.set(xticks=[], yticks=[])
