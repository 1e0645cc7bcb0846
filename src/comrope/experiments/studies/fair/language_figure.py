"""The figure of the study of languages: bits against length and position, and differences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.studies.fair.language_pairs import (
    BASE,
    METRIC,
    SUFFIX,
    Pair,
    compared_views,
    lengths_of,
    pairs_of,
    rotates_values,
)
from comrope.experiments.studies.plots import curve
from comrope.experiments.studies.stats import Difference
from comrope.experiments.studies.study import Results
from comrope.experiments.studies.tables import describe_seeds, row_name
from comrope.experiments.tasks.token_scores import position_edges

__all__ = ["figure"]

TITLES = {False: "queries and keys rotated", True: "with rotated values"}
WIDEST = 2.5  # times the median reach of the intervals: wider ones are cut off
LINE_HEIGHT = 0.2  # inches of a line of differences


def figure(results: Results) -> Any:
    """Draw bits per byte by length and by position, and differences from the searched base."""
    rows = results["rows"]
    groups = [[row for row in rows if rotates_values(row) == kind] for kind in (False, True)]
    pairs = [pair for pair in pairs_of(results) if pair.same_kind]
    heights = [3.8, 3.8, *([1.2 + LINE_HEIGHT * len(pairs)] if pairs else [])]
    mean_height = sum(heights) / len(heights)
    drawing, axes = new_figure(2, len(heights), width=6.6, height=mean_height)
    axes[0, 0].get_gridspec().set_height_ratios(heights)
    for axis_pair, group, kind in zip(axes[:2].T, groups, (False, True), strict=True):
        _draw_group(axis_pair, group, results, TITLES[kind])
    if pairs:
        _draw_differences(axes[2], pairs, results)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    drawing.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
        handlelength=4,
    )
    drawing.suptitle(
        f"{_finding(pairs, results)}\n{results['data']}; {describe_seeds(results)}", fontsize=11
    )
    return drawing


def _finding(pairs: Sequence[Pair], results: Results) -> str:
    """Return what the differences say, as the title."""
    if all(d is None or d.low is None for pair in pairs for d in pair.differences):
        return str(results.get("title", ""))
    parts = []
    for number, view in enumerate(compared_views(results)):
        clear = [p.differences[number] for p in pairs if p.significant[number]]
        better = sum(d is not None and d.verdict == "better" for d in clear)
        parts.append(f"{better} better and {len(clear) - better} worse at {view} tokens")
    return (
        f"Of {len(pairs)} rows, compared with the searched base and after Holm correction: "
        f"{'; '.join(parts)}"
    )


def _draw_group(axes: Any, group: Sequence[Results], results: Results, title: str) -> None:
    """Draw the rows with or without rotated values: by length above, by position below."""
    above, below = axes
    if not group:
        above.set_axis_off()
        below.set_axis_off()
        return
    lengths = lengths_of(results)
    context = results["recipe"]["language"]["context"]
    for row in group:
        style = _style(row, results)
        curve(above, [*map(int, lengths)], [row[METRIC][n] for n in lengths], **style)
        xs, means = _by_position(row, lengths[-1])
        below.plot(xs, means, linewidth=1.5, **{**style, "marker": ""})
    for axis in (above, below):
        axis.set_xscale("log", base=2)
        axis.axvline(context, color="0.8", zorder=0, linewidth=1)
        axis.grid(alpha=0.25)
    above.set_title(f"{title}; grey line: the training context", fontsize=10)
    above.set(
        xlabel="context length in evaluation, tokens",
        ylabel="bits per byte (band: ± one std)",
    )
    below.set(xlabel=f"position in a context of {lengths[-1]} tokens", ylabel="bits per token")


def _draw_differences(axes: Any, pairs: Sequence[Pair], results: Results) -> None:
    """Draw differences from the searched base with intervals, one panel for each view."""
    for number, (axis, view) in enumerate(zip(axes, compared_views(results), strict=True)):
        for place, pair in enumerate(pairs):
            found = pair.differences[number]
            if found is None:
                continue
            color = style_of(pair.mine["method"])["color"]
            reach = None if found.high is None else found.high - found.mean
            face = color if pair.significant[number] else "white"
            style = {**style_of(pair.mine["method"]), "markerfacecolor": face}
            axis.errorbar(
                found.mean, place, xerr=reach, capsize=2, markersize=5, linewidth=1.2, **style
            )
        axis.axvline(0, color="0.3", linewidth=1)
        axis.set_xlim(*_limits([pair.differences[number] for pair in pairs]))
        axis.set_ylim(len(pairs) - 0.4, -0.6)
        names = [row_name(pair.mine) for pair in pairs] if number == 0 else []
        axis.set_yticks(range(len(pairs)), names or [""] * len(pairs), fontsize=8)
        axis.set_title(f"difference from the searched base at {view} tokens", fontsize=10)
        axis.set_xlabel(
            "bits per byte, 95 % interval; negative is better\n"
            "filled: significant after Holm correction; very wide ones are cut off",
            fontsize=9,
        )
        axis.grid(alpha=0.25)


def _limits(found: Sequence[Difference | None]) -> tuple[float, float]:
    """Return the limits of an axis: all intervals, except that few very wide ones are cut off."""
    means = [d.mean for d in found if d is not None]  # are always shown
    ends = [
        (d.mean if d.low is None else d.low, d.mean if d.high is None else d.high)
        for d in found
        if d is not None
    ]
    reach = WIDEST * statistics.median([max(abs(a), abs(b)) for a, b in ends] or [1.0])
    low = min(0.0, *means, max(-reach, min((a for a, _ in ends), default=0.0)))
    high = max(0.0, *means, min(reach, max((b for _, b in ends), default=0.0)))
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _style(row: Results, results: Results) -> dict[str, Any]:
    """Return the method's colour; dashed for the searched base, pale for shared or p-RoPE."""
    bases = [*dict.fromkeys(r["fields"].get("model.base", BASE) for r in results["rows"])]
    fields = row["fields"]
    pale = "model.share_rotations" in fields or "model.rotated_share" in fields
    dashed = fields.get("model.base", BASE) == bases[-1] != bases[0]
    return {
        **style_of(row["method"]),
        "label": row_name(row).removesuffix(SUFFIX),
        "linestyle": "--" if dashed else "-",
        "alpha": 0.45 if pale else 1.0,
    }


def _by_position(row: Results, length: str) -> tuple[list[float], list[float]]:
    """Return the middle of every bin of positions, and the mean bits over seeds."""
    edges = position_edges(int(length))
    every = [run["figures"][length]["bits_by_position"] for run in row["runs"]]
    bins = [
        (max(1.0, (low * (high - 1)) ** 0.5), statistics.fmean(values))
        for low, high, values in zip(edges, edges[1:], zip(*every, strict=True), strict=False)
        if None not in values
    ]
    return [x for x, _ in bins], [y for _, y in bins]
