"""Accuracy at other resolutions, from relative coordinates to coordinates that count patches."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.figures import new_figure
from comrope.experiments.studies.markdown import label, number, rows, spread, spread_said
from comrope.experiments.studies.plots import curve, of_method

__all__ = ["figure", "table"]


def table(results: dict[str, Any]) -> str:
    sizes = [str(r) for r in results["resolutions"]]
    lines = []
    for cell in results["cells"]:
        means = {share: _mean(cell, share, sizes) for share in cell["units"]}
        best = max(means, key=lambda share: means[share]["mean"])
        for share, found in cell["units"].items():
            mean = number(means[share], 1)
            lines.append(
                [
                    label(cell),
                    share,
                    *(number(found[size], 1) for size in sizes),
                    f"**{mean}**" if share == best else mean,
                ]
            )
    header = ["method", "in patches", *(f"{size} px" for size in sizes), "mean"]
    return (
        "Top-1 accuracy, %, of the same weights. *In patches*: 0 is coordinates relative to the "
        "image, as trained and as everywhere else here; 1 counts patches, so that neighbours are "
        "as far apart as they were in training and a larger image reaches farther; between them, "
        f"and below 0, by powers.\n\n{rows(header, lines)}"
    )


def figure(results: dict[str, Any]) -> Any:
    """At the least and the largest resolution, and the mean over all, against the share."""
    sizes = [str(r) for r in sorted(results["resolutions"])]
    panels = {f"{sizes[0]} px": sizes[:1], f"{sizes[-1]} px": sizes[-1:], "mean over all": sizes}
    drawing, axes = new_figure(len(panels), width=4.6, height=4.0)
    for axis, (title, some) in zip(axes[0], panels.items(), strict=True):
        for cell in results["cells"]:
            shares = list(cell["units"])
            means = [_mean(cell, share, some) for share in shares]
            curve(axis, [float(share) for share in shares], means, **of_method(cell))
        axis.set(title=title, xlabel="0: relative coordinates, 1: patches")
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    handles = axes[0, 0].get_legend_handles_labels()
    drawing.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    told = spread_said(results, "bands") or "one seed"
    drawing.suptitle(f"{results['data']}\n{told}", fontsize=10)
    return drawing


def _mean(cell: dict[str, Any], share: str, sizes: list[str]) -> dict[str, Any]:
    """Over these resolutions, for every seed."""
    found = [run["units"][share] for run in cell["runs"]]
    return spread([sum(each[size] for size in sizes) / len(sizes) for each in found])
