"""Tab. 1: classification of images at resolutions other than the training resolution."""

from __future__ import annotations

from typing import Any

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.studies.plots import accuracy_curves, method_style
from comrope.experiments.studies.study import Preset, Results, Row, Study, method_label
from comrope.experiments.studies.tables import describe_spread, with_paper_table

__all__ = ["STUDY"]


def rows(preset: Preset) -> list[Row]:
    return [Row(m, p) for m in preset.methods for p in preset.perturbations]


def table(results: Results) -> str:
    return with_paper_table(results, "classification")


def figure(results: Results) -> Any:
    """Draw accuracy against resolution: a panel for each perturbation, and one for the paper."""
    sigmas = sorted({row["perturbation"] for row in results["rows"]}, reverse=True)
    drawing, axes = new_figure(len(sigmas) + 1)
    for axis, sigma in zip(axes[0], sigmas, strict=False):
        some = [row for row in results["rows"] if row["perturbation"] == sigma]
        accuracy_curves(axis, results, some, method_style)
        axis.set_title(f"ours: {results['data']}\nperturbation {sigma:g}", fontsize=10)
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    paper, axis = results["paper"]["classification"], axes[0, -1]
    for method, by_sigma in paper["top1"].items():
        label, style = method_label(method), style_of(method)
        axis.plot(paper["resolutions"], by_sigma["1"], **style, label=label, lw=1.8, ms=5)
    axis.axvline(paper["trained_at"], color="0.8", zorder=0, linewidth=1)
    axis.set(xlabel="evaluation resolution, px", xticks=paper["resolutions"])
    axis.tick_params(axis="x", rotation=60)
    axis.grid(alpha=0.25)
    axis.set_title(f"the paper: {paper['data']}\nperturbation 1", fontsize=10)
    shown: dict[str, Any] = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    below = {"loc": "outside lower center", "ncols": min(6, len(shown)), "frameon": False}
    drawing.legend([*shown.values()], [*shown], **below)
    notes = "; ".join(filter(None, (describe_spread(results, "band"), "grey line: training")))
    drawing.suptitle(f"Accuracy against resolution ({notes})", fontsize=12)
    return drawing


STUDY = Study(
    name="classification",
    title="2D classification over resolutions",
    where="Tab. 1",
    rows=rows,
    table=table,
    figure=figure,
)
