"""Results as pictures: one curve a method, the spread over seeds about it, the paper's beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from comrope.experiments.common.figures import STYLES, new_figure, save
from comrope.experiments.studies import LABELS
from comrope.experiments.studies.markdown import class_token_said, named, spread_said
from comrope.experiments.studies.tables import ELSEWHERE, made_elsewhere

__all__ = ["curve", "draw", "of_method", "resolutions"]


def draw(name: str, results: dict[str, Any], path: Path) -> None:
    """figure.png of a study."""
    drawings: dict[str, Callable[[dict[str, Any]], Any]] = {
        "classification": _classification,
        "offset": _offset,
        "distribution": _distribution,
        "finetune": _finetune,
        "cost": _cost,
    }
    drawing = made_elsewhere(name, "figure") if name in ELSEWHERE else drawings[name]
    save(drawing(results), path)


def curve(axis: Any, xs: list[float], spreads: list[dict[str, Any]], **style: Any) -> None:
    means = np.array([s["mean"] for s in spreads])
    axis.plot(xs, means, linewidth=1.8, markersize=5, **style)
    if spreads[0]["std"] is not None:
        stds = np.array([s["std"] for s in spreads])
        axis.fill_between(xs, means - stds, means + stds, color=style["color"], alpha=0.15, lw=0)


def resolutions(
    axis: Any, results: dict[str, Any], cells: list[dict[str, Any]], style_of: Callable[..., Any]
) -> None:
    """Accuracy against resolution, one curve a cell."""
    xs = results["resolutions"]
    for number, cell in enumerate(cells):
        style = style_of(cell, number)
        curve(axis, xs, [cell["top1"][str(x)] for x in xs], **style)
    axis.axvline(results["trained_at"], color="0.8", zorder=0, linewidth=1)
    axis.set(xlabel="evaluation resolution, px", xticks=xs)
    axis.tick_params(axis="x", rotation=60)
    axis.grid(alpha=0.25)


def of_method(cell: dict[str, Any], _: int = 0) -> dict[str, Any]:
    """Its colour, mark and name."""
    return {**STYLES[cell["method"]], "label": named(cell)}


def _classification(results: dict[str, Any]) -> Any:
    sigmas = sorted({cell["perturbation"] for cell in results["cells"]}, reverse=True)
    figure, axes = new_figure(len(sigmas) + 1)
    for axis, sigma in zip(axes[0], sigmas, strict=False):
        cells = [cell for cell in results["cells"] if cell["perturbation"] == sigma]
        resolutions(axis, results, cells, of_method)
        axis.set_title(f"ours: {results['data']}\nperturbation {sigma:g}", fontsize=10)
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    paper, axis = results["paper"]["classification"], axes[0, -1]
    for method, by_sigma in paper["top1"].items():
        axis.plot(
            paper["resolutions"],
            by_sigma["1"],
            **STYLES[method],
            label=LABELS[method],
            lw=1.8,
            ms=5,
        )
    axis.axvline(paper["trained_at"], color="0.8", zorder=0, linewidth=1)
    axis.set(xlabel="evaluation resolution, px", xticks=paper["resolutions"])
    axis.tick_params(axis="x", rotation=60)
    axis.grid(alpha=0.25)
    axis.set_title(f"the paper: {paper['data']}\nperturbation 1", fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False
    )
    told = "; ".join(filter(None, (spread_said(results, "band"), "grey line: training")))
    figure.suptitle(f"Accuracy against resolution ({told})", fontsize=12)
    return figure


def _offset(results: dict[str, Any]) -> Any:
    figure, axes = new_figure(1, width=7.0)
    axis = axes[0, 0]
    for cell in results["cells"]:
        xs = [float(x) for x in cell["offset"]]
        style = of_method(cell)
        style["label"] += class_token_said(cell)
        curve(axis, xs, list(cell["offset"].values()), **style)
    axis.set(xlabel="ρ, image widths", ylabel="top-1 accuracy, %")
    axis.set_title(f"Accuracy when the coordinates of every image are moved by N(0, ρ²)\n"
                   f"{results['data']}", fontsize=10)  # fmt: skip
    axis.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _distribution(results: dict[str, Any]) -> Any:
    sizes = sorted({cell["block_size"] for cell in results["cells"]})
    figure, axes = new_figure(len(sizes), 2, height=3.2)
    for column, size in enumerate(sizes):
        for cell in (c for c in results["cells"] if c["block_size"] == size):
            shape = cell["runs"][0]["histogram"]
            edges = np.array(shape["edges"])
            style = STYLES[cell["method"]]
            for axis in axes[:, column]:
                axis.step(
                    (edges[1:] + edges[:-1]) / 2,
                    shape["density"],
                    where="mid",
                    color=style["color"],
                    label=f"{LABELS[cell['method']]}, std {cell['std']['mean']:.2f}",
                )
        axes[0, column].set_title(f"blocks of {size}", fontsize=11)
        axes[0, column].legend(frameon=False, fontsize=8)
        axes[1, column].set(yscale="log", xlabel="element of an angle matrix")
    axes[0, 0].set_ylabel("density")
    axes[1, 0].set_ylabel("density, logarithmic")
    figure.suptitle(f"Angle matrices after training (one seed)\n{results['data']}", fontsize=11)
    return figure


def _finetune(results: dict[str, Any]) -> Any:
    """Accuracy at the training resolution, a row a method: seeds, mean and spread; the paper's."""
    figure, axes = new_figure(2, width=5.6, height=3.6)
    before = [cell for cell in results["cells"] if not cell["finetuned"]]
    after = [cell for cell in results["cells"] if cell["finetuned"]]
    size = str(results["trained_at"])
    size = size if size in after[0]["top1"] else next(iter(after[0]["top1"]))
    ours, theirs = axes[0]
    for row, cell in enumerate(after):
        found, style = cell["top1"][size], STYLES[cell["method"]]
        ours.plot(found["values"], [row] * len(found["values"]), "|", color="0.4", markersize=9)
        ours.errorbar(found["mean"], row, xerr=found["std"], capsize=3, markersize=7, **style)
    for cell in before:
        start = cell["top1"][size]["mean"]
        ours.axvline(start, color="0.5", linestyle="--", linewidth=1, label="before")
        ours.legend(frameon=False, fontsize=9)
    ours.set_title(f"ours: {results['data']}", fontsize=10)
    paper = results["paper"]["finetune"]
    for row, cell in enumerate(after):
        if cell["method"] in paper["top1"]:
            theirs.plot(paper["top1"][cell["method"]], row, markersize=7, **STYLES[cell["method"]])
    theirs.set_title(f"the paper: {paper['data']}", fontsize=10)
    names = [LABELS[cell["method"]].split(" (")[0] for cell in after]
    ours.set_yticks(range(len(names)), names)
    theirs.set_yticks(range(len(names)), [])
    for axis in axes[0]:
        axis.set(xlabel="top-1 accuracy, %", ylim=(len(names) - 0.5, -0.5))
        axis.grid(alpha=0.25)
    told = spread_said(results, "bar")
    spread = f" ({told})" if told else ""
    epochs = results["recipe"]["train"]["epochs"]
    figure.suptitle(
        f"After {epochs} epochs on top of a model trained with APE{spread}", fontsize=11
    )
    return figure


def _cost(results: dict[str, Any]) -> Any:
    figure, axes = new_figure(2, width=6.0)
    rows = results["times"]
    names = [
        LABELS[row["method"]].split(" (")[0]
        + (f", b = {row['block_size']}" if row["error"] is not None else "")
        for row in rows
    ]
    colors = [STYLES[row["method"]]["color"] for row in rows]
    for axis, key, title in zip(
        axes[0], ("train_ratio", "inference_ratio"), ("a training step", "inference"), strict=True
    ):
        values = [row[key] for row in rows]
        axis.barh(names, values, color=colors)
        axis.bar_label(axis.containers[0], fmt="%.2f", padding=3, fontsize=9)
        axis.axvline(1, color="0.3", linewidth=1)
        axis.invert_yaxis()
        axis.set(xlabel=f"time of {title}, vanilla RoPE = 1", xlim=(0, 1.15 * max(values)))
    axes[0, 1].set_yticklabels([])
    figure.suptitle(f"{results['timed']}, {results['machine']['device']}", fontsize=10)
    return figure
