"""Tab. 2: object detection. Six APs, AP against epochs, and images with detections."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import torch

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.figures import STYLES, new_figure, style_of
from comrope.experiments.config import Config, starts_at_zero
from comrope.experiments.data.batches import Key
from comrope.experiments.data.boxes import BoxSource
from comrope.experiments.runs.records import Record
from comrope.experiments.studies.measure import Runs
from comrope.experiments.studies.plan import Plan
from comrope.experiments.studies.stats import difference
from comrope.experiments.studies.study import (
    Preset,
    Results,
    Row,
    Scale,
    Start,
    Study,
    method_label,
)
from comrope.experiments.studies.tables import (
    describe_spread,
    format_difference,
    format_mean,
    markdown_table,
    row_label,
    spread,
)
from comrope.experiments.tasks.coco_metrics import METRICS
from comrope.experiments.tasks.detection import DetectionTask
from comrope.experiments.training.evaluate import load_run

__all__ = ["STUDY", "ap_by_epoch", "draw_detections"]

SCALES = {
    "demo": Scale("scenes", "digits scattered over 48 px, Faster R-CNN over ViT-nano/4"),
    "small": Scale("bccd", "BCCD at 320 px, Faster R-CNN over ViT-S/8"),
    "paper": Scale("coco", "COCO at 1,024 px, Mask R-CNN over ViT-S/16"),
}
SHOWN = 3  # images of detections.png


def rows(preset: Preset) -> list[Row]:
    """Return rows with rotations that start at zero, so without vanilla RoPE."""
    methods = [m for m in preset.methods if starts_at_zero(m)]
    return [Row(m, perturbation=0.0, finetuned=True) for m in methods]


def seeds(preset: Preset) -> int:
    return 1 if preset.name == "demo" else preset.seeds


def start_recipe(preset: Preset) -> str:
    return "digits_patch4" if preset.name == "demo" else preset.recipe


def ap_by_epoch(record: Record, config: Config) -> dict[str, Any]:
    """Return the AP after each evaluated epoch, including the last; empty for a classifier."""
    if "AP" not in record.result:  # the pre-training run
        return {}
    found = {str(each["epoch"]): each["AP"] for each in record.evaluations if "AP" in each}
    last = record.result["AP"].get(str(DetectionTask(config).training_view.resolution))
    return {"by_epoch": found if last is None else {**found, str(config.train.epochs): last}}


def table(results: Results) -> str:
    found, size = [row for row in results["rows"] if row["finetuned"]], str(results["trained_at"])
    text = _describe(results) + _figures(found, size, "figures")
    if all("masks" in run["figures"][size] for row in found for run in row["runs"]):
        text += f"\nMasks:\n\n{_figures(found, size, 'masks')}"
    paper = results["paper"]["detection"]
    lines = [[method_label(m), *(f"{v:.1f}" for v in vs)] for m, vs in paper["figures"].items()]
    other = "" if results["preset"] == "paper" else ", on another data set"
    header = ["method", *METRICS]
    return f"{text}\nThe paper's{other} ({paper['data']}):\n\n{markdown_table(header, lines)}"


def _describe(results: Results) -> str:
    recipe = results["recipe"]
    start = f"`{recipe['train']['start_from']}`"
    if before := results.get("pretraining"):
        start = f"{before['train']['epochs']} epochs of classification with APE"
    optim = recipe["optim"]
    return (
        f"COCO's average precision of boxes, %, after {recipe['train']['epochs']} epochs that "
        f"follow {start}. Every method is added to the APE of the pre-trained backbone, with "
        f"angles that start at zero. Learning rate {optim['lr']:g}, of the angles "
        f"{optim['lr'] * optim['angle_lr_scale']:g}, times {optim['layer_decay']:g} for each layer "
        "towards the input. *Over APE*: the difference in AP, paired by seed, with its 95 % "
        "confidence interval (Student's t). Speed and memory are of runs that may have shared the "
        "GPU with others.\n\n"
    )


def _figures(found: list[Results], size: str, kind: str) -> str:
    def values(row: Results, name: str) -> dict[int, Any]:
        by_seed = {run["seed"]: run["figures"][size] for run in row["runs"]}
        return {s: (f["masks"] if kind == "masks" else f)[name] for s, f in by_seed.items()}

    baseline = next((row for row in found if row["method"] == "ape"), None)
    header = ["method", *METRICS, "over APE", "", "images/s in training", "peak memory, GiB"]
    lines = []
    for row in found:
        line = [row_label(row)]
        for name in METRICS:
            some = [*values(row, name).values()]
            line.append("–" if None in some else format_mean(spread(some), 1))
        over = None
        if baseline is not None and row is not baseline:
            over = difference(values(row, "AP"), values(baseline, "AP"))
        speeds = [speed for run in row["runs"] if (speed := run.get("images_per_second"))]
        memory = max(run.get("peak_memory_gib") or 0 for run in row["runs"])
        line += [*format_difference(over), f"{fmean(speeds):.0f}" if speeds else "–"]
        lines.append([*line, f"{memory:.1f}" if memory else "–"])
    return markdown_table(header, lines)


def figure(results: Results) -> Any:
    """Draw AP against epochs, one curve per method; to the right the last epoch, by seed."""
    found = [row for row in results["rows"] if row["finetuned"]]
    drawing, axes = new_figure(2, width=5.8)
    curves, ends = axes[0]
    for place, row in enumerate(found):
        style, label = style_of(row["method"]), method_label(row["method"], short=True)
        epochs = [*row["runs"][0]["by_epoch"]]
        ap = np.array([[run["by_epoch"][epoch] for epoch in epochs] for run in row["runs"]])
        xs, mean = [int(epoch) for epoch in epochs], ap.mean(0)
        curves.plot(xs, mean, lw=1.8, ms=5, label=label, **style)
        last_std = None
        if len(ap) > 1:
            std = ap.std(0, ddof=1)
            curves.fill_between(xs, mean - std, mean + std, color=style["color"], alpha=0.15, lw=0)
            last_std = std[-1]
        ends.plot(ap[:, -1], [place] * len(ap), "|", color="0.4", markersize=9)
        ends.errorbar(mean[-1], place, xerr=last_std, capsize=3, markersize=7, **style)
    curves.set(xlabel="epoch", ylabel="AP, %", title="during training")
    curves.xaxis.get_major_locator().set_params(integer=True)
    curves.legend(frameon=False, fontsize=9)
    ends.set(xlabel="AP, %", title="after the last epoch", ylim=(len(found) - 0.5, -0.5))
    ends.set_yticks(range(len(found)), [method_label(r["method"], short=True) for r in found])
    for axis in axes[0]:
        axis.grid(alpha=0.25)
    shown = describe_spread(results, "band and bar")
    drawing.suptitle(f"{results['data']}{f' ({shown})' if shown else ''}", fontsize=11)
    return drawing


def draw_found(plan: Plan, runs: Runs) -> Any:
    """Draw the detections of a trained model: of ComRoPE-LD if there is one, else the last row."""
    found = [row for row in plan.rows if row.finetuned]
    chosen = next((row for row in found if row.method == "comrope-ld"), found[-1])
    config = plan.rows[chosen][0]
    return draw_detections(load_run(runs.path(config))[1], config)


def draw_detections(model: Any, config: Config) -> Any:
    """Draw the annotations of a few validation images, and below them a model's detections."""
    accelerator = create_accelerator(config.train.device)
    task = DetectionTask(config)
    view, source = task.training_view, task.open(train=False).validation
    chosen = _choose_images(source)
    items = task.dataset(source, view)
    batch = task.collate([items[Key(0, index, index)] for index in chosen])
    model.to(accelerator.device)
    found, _ = task.find(model, [batch], source, view, accelerator)
    names = dict(zip(source.category_ids, source.classes, strict=True))
    drawing, axes = new_figure(len(chosen), 2, width=3.6, height=3.2)
    for column, (image, own) in enumerate(zip(batch.images, batch.image_ids, strict=True)):
        annotated = [a for a in source.truth["annotations"] if a["image_id"] == own]
        detected = sorted((f for f in found if f["image_id"] == own), key=lambda f: -f["score"])
        detected = detected[: len(annotated)]
        for axis, entries in zip(axes[:, column], (annotated, detected), strict=True):
            _draw_boxes(axis, image, entries, names)
    axes[0, 0].set_ylabel("annotated")
    method = method_label(config.model.position, short=True)
    axes[1, 0].set_ylabel(f"found by {method}:\nas many, highest scores")
    return drawing


def _choose_images(source: BoxSource) -> list[int]:
    """Return images with many categories, spread over the validation set."""
    categories: dict[int, set[int]] = {}
    for annotation in source.truth["annotations"]:
        categories.setdefault(annotation["image_id"], set()).add(annotation["category_id"])
    ids = [image["id"] for image in source.truth["images"]]
    parts = np.array_split(np.arange(len(ids)), min(SHOWN, len(ids)))
    return [max(part.tolist(), key=lambda i: len(categories.get(ids[i], ()))) for part in parts]


def _draw_boxes(
    axis: Any, image: torch.Tensor, entries: list[dict[str, Any]], names: dict[int, str]
) -> None:
    from matplotlib.patches import Rectangle

    colours = list(STYLES.values())[2:]
    height, width = image.shape[-2:]
    edges = (0, width, height, 0)  # boxes are given from edge to edge
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


STUDY = Study(
    name="detection",
    title="Object detection with a pre-trained backbone",
    where="Tab. 2",
    scales=SCALES,
    seeds=seeds,
    start=Start(
        Row("ape", perturbation=0.0),
        recipe=start_recipe,
        other_data=True,
        shared=True,
        decides=("model.ape", "model.init"),
    ),
    rows=rows,
    collect=ap_by_epoch,
    artifacts={"detections.png": draw_found},
    table=table,
    figure=figure,
)
