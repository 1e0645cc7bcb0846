"""Tab. 3: classification of clips, at other resolutions, lengths and spans of the video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from comrope.experiments.common.figures import new_figure
from comrope.experiments.studies.plots import accuracy_curves, curve, method_style
from comrope.experiments.studies.stats import compare, difference
from comrope.experiments.studies.study import Preset, Results, Row, Scale, Study, method_label
from comrope.experiments.studies.tables import (
    NOTE_INTERVALS,
    describe_spread,
    format_difference,
    format_mean,
    markdown_table,
    row_label,
    spread,
    training_size,
    with_paper_table,
)

__all__ = ["STUDY", "other_clips", "over_baselines", "pair_accuracy", "pair_of"]

SCALES = {
    "demo": Scale("moving", "shapes that move to the left or to the right, ViT-nanovideo"),
    "small": Scale("gesture5", "gesture5, the paper's 3D ViT at 112 px"),
    "paper": Scale("ucf101", "UCF-101, the paper's 3D ViT at 224 px"),
}
# Pairs of classes that differ only in the direction of time.
PAIRS = (("LeftSwipe", "RightSwipe"), ("left", "right"))
# The control: all frames have the same time coordinate, so the rotation is independent of order.
CONTROL = "comrope-ld"
NO_TIME = ("model.axis_scale", (0.0, 1.0, 1.0))


def rows(preset: Preset) -> list[Row]:
    """Return the rows of the classification study, and the control."""
    label = f"{method_label(CONTROL, short=True)}, time axis removed"
    control = Row(CONTROL, preset.perturbations[0], fields=(NO_TIME,), label=label)
    return [*(Row(m, p) for m in preset.methods for p in preset.perturbations), control]


def seeds(preset: Preset) -> int:
    return 1 if preset.name == "demo" else max(3, preset.seeds)  # a demo should be short


def is_control(row: Results) -> bool:
    return NO_TIME[0] in row["fields"]


def table(results: Results) -> str:
    """Return accuracy by resolution, differences, and accuracy for other lengths of clips."""
    clip = results["recipe"]["data"]["frames"]
    return (
        f"Clips of {clip} frames from all of a video, at other resolutions:\n\n"
        f"{with_paper_table(results, 'video')}\n{over_baselines(results)}Other clips, at "
        f"{results['trained_at']} px. *Time axis removed*: a control. All frames have the same "
        f"time coordinate, so their order is lost.\n\n{other_clips(results['rows'])}"
    )


def over_baselines(results: Results) -> str:
    """Return differences from APE and vanilla RoPE with the same perturbation."""
    found, sizes = results["rows"], [*map(str, results["resolutions"])]
    size = training_size(results)
    wanted = (("ape", [size]), ("ape", sizes), ("rope", sizes))
    lines = []
    for row in found:
        sigma = row["perturbation"]
        line = [row_label(row), f"{sigma:g}"]
        for method, views in wanted:
            same = (r for r in found if (r["method"], r["perturbation"]) == (method, sigma))
            other = next(same, row)
            line += format_difference(None if other is row else compare(row, other, views))
        lines.append(line)
    if all(set(line[2:]) == {"–"} for line in lines):
        return ""
    mean = "mean over resolutions"
    header = ["method", "σ", f"over APE at {size} px", "", f"over APE, {mean}", ""]
    header += [f"over vanilla RoPE, {mean}", ""]
    return f"{NOTE_INTERVALS}{markdown_table(header, lines)}\n"


def other_clips(found: Sequence[Results]) -> str:
    """Return accuracy for other frames and spans, and for classes that differ only in time."""
    others = [name for name in found[0]["top1"] if not name.isdigit()]
    header = ["method", "σ", *others]
    lines = [
        [
            row_label(row),
            f"{row['perturbation']:g}",
            *(format_mean(row["top1"][name], 1) for name in others),
        ]
        for row in found
    ]
    classes = found[0]["runs"][0].get("classes") or ()
    pair = pair_of(classes)
    if pair is None or len(classes) == 2:  # for two classes it is the accuracy
        return markdown_table(header, lines)
    header.append(f"{' or '.join(pair)}")
    lines = [
        [*line, format_mean(spread([pair_accuracy(pair, run) for run in row["runs"]]), 1)]
        for line, row in zip(lines, found, strict=True)
    ]
    note = (
        f"*{header[-1]}*: of the clips of these two classes that are assigned to one of them, the "
        "share that is assigned to the right one, %.\n\n"
    )
    over = _over_control(header[-1], found, lambda run: pair_accuracy(pair, run))
    return note + markdown_table(header, lines) + over


def _over_control(what: str, found: Sequence[Results], measured: Callable[[Results], float]) -> str:
    """Return the difference of a number between a row and its copy without the time axis."""
    text = ""
    for control in filter(is_control, found):
        kind = (control["method"], control["perturbation"])
        for row in found:
            if (row["method"], row["perturbation"]) == kind and not is_control(row):
                mine, other = (
                    {run["seed"]: measured(run) for run in each["runs"]} for each in (row, control)
                )
                shown, verdict = format_difference(difference(mine, other))
                names = f"{row_label(row)} over {row_label(control)}"
                text += f"\n{what}, {names}: {shown}, {verdict}.\n"
    return text


def pair_of(classes: Sequence[str] | None) -> tuple[str, str] | None:
    """Return two classes that differ only in the direction of time, or None."""
    return next((pair for pair in PAIRS if set(pair) <= set(classes or ())), None)


def pair_accuracy(pair: tuple[str, str], run: Results) -> float:
    """Return the accuracy, %, on clips of two classes that were assigned to one of the two."""
    first, second = map(run["classes"].index, pair)
    counts = run["confusion"]  # the confusion matrix
    right = counts[first][first] + counts[second][second]
    wrong = counts[first][second] + counts[second][first]
    return float(100 * right / max(1, right + wrong))


def _style(row: Results, _: int = 0) -> dict[str, Any]:
    """Return the style of a method; hollow and dotted for the control."""
    style = method_style(row)
    return style | ({"linestyle": ":", "markerfacecolor": "white"} if is_control(row) else {})


def figure(results: Results) -> Any:
    """Draw accuracy against resolution, against frames, and against the span of the video."""
    sigma = max(row["perturbation"] for row in results["rows"])
    found = [row for row in results["rows"] if row["perturbation"] == sigma]
    drawing, axes = new_figure(3, width=5.0)
    accuracy_curves(axes[0, 0], results, found, _style)
    usual, clip = str(results["trained_at"]), results["recipe"]["data"]["frames"]
    lengths = {
        "frames of a clip": {**{n: f"{n} frames" for n in results["frames"]}, clip: usual},
        "share of the video that a clip is taken from": {
            **{s: f"{s:g} of the video" for s in results["spans"]},
            1.0: usual,
        },
    }
    for axis, (label, views) in zip(axes[0, 1:], lengths.items(), strict=True):
        xs = sorted(views)
        for row in found:
            if all(name in row["top1"] for name in views.values()):
                curve(axis, xs, [row["top1"][views[x]] for x in xs], **_style(row))
        axis.set(xlabel=label, xticks=xs)
        axis.grid(alpha=0.25)
        axis.sharey(axes[0, 0])
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    shown = describe_spread(results, "band")
    drawing.suptitle(
        f"{results['data']}{f' ({shown})' if shown else ''}, perturbation {sigma:g}", fontsize=11
    )
    return drawing


STUDY = Study(
    name="video",
    title="3D classification of clips",
    where="Tab. 3",
    scales=SCALES,
    seeds=seeds,
    rows=rows,
    show_settings=False,  # the table describes the control
    table=table,
    figure=figure,
)
