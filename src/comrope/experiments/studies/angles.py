"""What the angles learned: the frequencies of every plane, at the start and after training."""

from __future__ import annotations

from typing import Any

import numpy as np

from comrope.experiments.common.figures import STYLES, new_figure
from comrope.experiments.studies.markdown import named, rows, seeds_said

__all__ = ["figure", "table"]


def table(results: dict[str, Any]) -> str:
    lines = []
    for cell in results["cells"]:
        for layer, (start, learned) in enumerate(zip(*_both(cell), strict=True)):
            if layer in _told(len(cell["runs"][0]["start"])):
                fast, faster = np.linalg.norm(start, axis=0), np.linalg.norm(learned, axis=0)
                quartiles = [np.quantile(s, (0.25, 0.5, 0.75)) for s in (fast, faster)]
                lines.append(
                    [
                        named(cell),
                        str(layer),
                        *(f"{m:.1f} [{low:.1f}, {high:.1f}]" for low, m, high in quartiles),
                    ]
                )
    header = ["method", "layer", "at the start", "after training"]
    return (
        "How fast the phases of planes grow, in radians per image width along their steepest "
        "direction: median and quartiles over the planes of all heads and seeds.\n\n"
        + rows(header, lines)
    )


def figure(results: dict[str, Any]) -> Any:
    """Frequencies along two axes, a panel a method; below, their sizes layer by layer."""
    from matplotlib import colormaps

    cells = results["cells"]
    drawing, axes = new_figure(len(cells), 2, width=4.0, height=3.7)
    reach = 1.05 * max(np.abs(both).max() for cell in cells for both in _both(cell))
    for (top, below), cell in zip(axes.T, cells, strict=True):
        start, learned = _both(cell)
        depth = len(start)
        top.scatter(*_flat(start), s=3, color="0.75", label="at the start", rasterized=True)
        for layer, found in enumerate(learned):
            color = colormaps["viridis"](0.9 * layer / max(depth - 1, 1))
            name = f"layer {layer}" if layer in (0, depth - 1) else None
            top.scatter(found[0], found[1], s=3, color=color, label=name, rasterized=True)
        top.set_title(named(cell).split(" (")[0], fontsize=11)
        top.set(xlabel="along the first axis", xlim=(-reach, reach), ylim=(-reach, reach))
        top.axhline(0, color="0.9", zorder=0)
        top.axvline(0, color="0.9", zorder=0)
        style = STYLES[cell["method"]]
        for found, name, look in (
            (start, "at the start", {"color": "0.6", "linestyle": "--"}),
            (learned, "after training", style),
        ):
            sizes = [np.linalg.norm(layer, axis=0) for layer in found]
            below.plot(range(depth), [np.median(s) for s in sizes], label=name, ms=5, **look)
            low, high = np.array([np.quantile(s, (0.25, 0.75)) for s in sizes]).T
            below.fill_between(range(depth), low, high, color=look["color"], alpha=0.2, lw=0)
        below.set(xlabel="layer", ylim=(0, None), xticks=range(0, depth, 1 + depth // 8))
        below.grid(alpha=0.25)
    axes[0, 0].set_ylabel("radians per image, along the second")
    axes[0, 0].legend(frameon=False, fontsize=8, markerscale=3)
    axes[1, 0].set_ylabel("radians per image; median, quartiles")
    axes[1, 0].legend(frameon=False, fontsize=8)
    seeds = seeds_said(results)
    drawing.suptitle(f"Frequencies of all planes ({seeds}): {results['data']}", fontsize=12)
    return drawing


def _both(cell: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(layers, N, planes of all seeds)."""
    start, learned = (
        np.concatenate([run[when] for run in cell["runs"]], axis=2) for when in ("start", "learned")
    )
    return start, learned


def _flat(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = frequencies[:, 0].ravel(), frequencies[:, 1].ravel()
    return first, second


def _told(depth: int) -> set[int]:
    """First, middle and last."""
    return {0, depth // 2, depth - 1}
