"""Tables and the figure of ``comrope bench --preset cpu``.

A ratio is the median of the repetitions, followed by the smallest and the largest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from comrope.experiments.common.figures import new_figure, style_of
from comrope.experiments.studies.study import Results
from comrope.experiments.studies.tables import markdown_table

__all__ = ["decode", "growth", "layer", "sizes", "sizes_figure", "sizes_title", "step"]

Row = dict[str, Any]
MIXED, AXIAL, APE = "timm RoPE-Mixed", "timm axial", "timm APE"
SWEEPS = ("tokens", "heads", "block_size", "axes", "batch")
SIZES = ("comrope-ld", "rope-mixed", "copy of q and k")
MODES = ((False, "eager"), (True, "compiled"))


def layer(results: Results) -> str:
    """Return the table of the rotation of one layer, relative to timm's RoPE-Mixed."""
    parts = _parts(results, "layer")
    columns = [(part, mode) for part in parts for mode, _ in MODES]
    names = dict.fromkeys(row["name"] for rows in parts.values() for row in rows)
    lines = [
        [name, *(_ratio(_find(parts[part], name, mode), "step", MIXED) for part, mode in columns)]
        for name in names
    ]
    against = [_ratio(_find(parts[p], "rope", mode), "step", AXIAL) for p, mode in columns]
    lines.append(["rope ÷ timm axial RoPE", *against])
    bases = [_find(parts[part], "timm RoPE-Mixed", mode) for part, mode in columns]
    ms = [f"{row['measures']['step']['ms']:.1f}" if row else "–" for row in bases]
    dtypes = [part.rstrip(")").split(", ")[-1] for part in parts]
    header = [f"{dtype}, {word}" for dtype in dtypes for _, word in MODES]
    return (
        f"{markdown_table(['', *header], lines)}\n{next(iter(parts))}, forward and backward, in "
        f"times of timm's RoPE-Mixed ({', '.join(ms)} ms). {_how(results, 'layer')}\n"
    )


def step(results: Results) -> str:
    """Return the table of steps of a ViT, relative to the ViT without positions."""
    if not (parts := _parts(results, "step")):
        return _not_run(results, "step")
    small, large = parts.values()
    columns = [
        (rows, key, mode)
        for rows, key in ((small, "forward"), (small, "step"), (large, "step"))
        for mode, _ in MODES
    ]
    lines = []
    for name in dict.fromkeys(row["name"] for row in small):
        cells = [_ratio(_find(rows, name, mode), key, "none") for rows, key, mode in columns]
        lines.append([name, *cells, _memory(_find(small, name, False))])
    for name in dict.fromkeys(row["name"] for row in small if "timm" in row["name"]):
        if "APE" not in name:
            cells = [_ratio(_find(rows, name, mode), key, APE) for rows, key, mode in columns]
            lines.append([f"{name.split(',')[0]} ÷ {APE}", *cells, "–"])
    batches = [_batch(rows[0]) for rows in (small, large)]
    header = [
        "",
        *(f"inference, batch {batches[0]}, eager", "compiled"),
        *(text for batch in batches for text in (f"step, batch {batch}, eager", "compiled")),
        "peak memory of a step",
    ]
    return (
        f"{markdown_table(header, lines)}\n{small[0]['part']}, in times of *none*. "
        f"{_how(results, 'step')}\n"
    )


def decode(results: Results) -> str:
    """Return the table of one decoded token."""
    (rows,) = _parts(results, "decode").values()
    lines = [
        [
            row["name"],
            f"{row['measures']['forward']['ms']:.2f}",
            _ratio(row, "forward", "none"),
            f"{row['error']:.0e}",
        ]
        for row in rows
        if row["measures"]
    ]
    header = ["", "ms", "÷ none", "error"]
    return f"{markdown_table(header, lines)}\n{rows[0]['part']}, eager. {_how(results, 'decode')}\n"


def sizes(results: Results) -> str:
    """Return the table of growth: time and memory per vector at the largest by the smallest size.

    A vector is one token of one head and sample.
    """
    if not (parts := _parts(results, "sizes")):
        return _not_run(results, "sizes")
    lines = []
    for sweep in SWEEPS:
        for name in SIZES:
            points = _sweep(results, name, sweep)
            if len(points) > 1:
                (low, first), (high, last) = points[0], points[-1]
                found = [cost(last) / cost(first) for cost in (_time, _bytes)]
                label = f"{sweep.replace('_', ' ')}, {low} to {high:,}"
                cells = [f"{value:.2f}" for value in found]
                lines.append([label, name, f"{_time(first):.0f}", f"{_time(last):.0f}", *cells])
    (part,) = parts
    header = ["size", "", "first, ns", "last, ns", "time grows", "memory grows"]
    others = ", ".join(
        f"{value} {name.replace('_', ' ')}" for name, value in _base(results).items()
    )
    return (
        f"{markdown_table(header, lines)}\n{part}: forward and backward, eager, per token, head "
        f"and sample; the sizes that do not change: {others}. {_how(results, 'sizes')}\n"
    )


def growth(results: Results, name: str) -> tuple[int, int, float]:
    """Return the fewest and the most tokens, and the ratio of the times per token."""
    points = _sweep(results, name, "tokens")
    (low, first), (high, last) = points[0], points[-1]
    return low, high, _time(last) / _time(first)


def sizes_title(results: Results) -> str:
    """Return the finding of the figure."""
    found = {name: growth(results, name) for name in SIZES}
    low, high, ld = found["comrope-ld"]
    return (
        f"From {low} to {high:,} tokens, the time per token changes by a factor of {ld:.1f} with "
        f"comrope-ld,\nof {found['rope-mixed'][2]:.1f} with rope-mixed and of "
        f"{found['copy of q and k'][2]:.1f} for a copy of q and k"
    )


def sizes_figure(results: Results) -> Any:
    """Return the figure of time over every size, and of memory over tokens."""
    figure, axes = new_figure(3, 2, width=4.0, height=3.0)
    panels = [*((sweep, _time, "ns per token and head") for sweep in SWEEPS)]
    panels.append(("tokens", _share, "peak memory ÷ q and k"))
    for axis, (sweep, cost, label) in zip(axes.flat, panels, strict=True):
        for name in SIZES:
            points = _sweep(results, name, sweep)
            if len(points) > 1:
                style = style_of(name if name != SIZES[-1] else "none")
                x, y = [value for value, _ in points], [cost(row) for _, row in points]
                axis.plot(x, y, label=name, linewidth=2, markersize=7, **style)
        axis.set_xscale("log", base=2)
        ticks = [value for value, _ in _sweep(results, SIZES[0], sweep)]
        ticks = [t for t in ticks if t != 12544]  # beside 16,384
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.set_xlabel(sweep.replace("_", " "), fontsize=12)
        axis.set_ylabel(label, fontsize=12)
        axis.tick_params(labelsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1, 2].legend(fontsize=11, frameon=False, loc="lower left")  # below the lines of memory
    figure.suptitle(sizes_title(results), fontsize=14)
    return figure


def _parts(results: Results, suite: str) -> dict[str, list[Row]]:
    parts: dict[str, list[Row]] = {}
    for row in results["rows"]:
        if row["suite"] == suite:
            parts.setdefault(row["part"], []).append(row)
    return parts


def _find(rows: Sequence[Row], name: str, compiled: bool) -> Row | None:
    same = (row for row in rows if (row["name"], row["compiled"]) == (name, compiled))
    return next((row for row in same if row["measures"]), None)


def _ratio(row: Row | None, key: str, label: str) -> str:
    measure = {} if row is None else row["measures"].get(key, {})
    if label not in measure.get("of", {}):
        return "–"
    low, high = (f"{end(measure['of_runs'][label]):.2f}" for end in (min, max))
    return f"{measure['of'][label]:.2f}" + (f" ({low}–{high})" if low != high else "")


def _memory(row: Row | None) -> str:
    of = {} if row is None or "step" not in row["measures"] else row["peak_of"]
    return f"{of['none']:.2f}" if "none" in of else "–"


def _batch(row: Row) -> str:
    return str(row["part"]).partition("batch ")[2].partition(",")[0]


def _sweep(results: Results, name: str, sweep: str) -> list[tuple[int, Row]]:
    """Return the timed rows of a name where only one size differs from the others, by that size."""
    found, base = [], _base(results)
    for row in results["rows"]:
        if row["suite"] == "sizes" and row["name"] == name and row["measures"]:
            rest = {key: value for key, value in row["sizes"].items() if key != sweep}
            if rest.items() <= base.items():
                found.append((row["sizes"][sweep], row))
    return sorted(found, key=lambda point: point[0])


def _base(results: Results) -> dict[str, int]:
    """Return the sizes that most rows have."""
    rows = [row["sizes"] for row in results["rows"] if row["suite"] == "sizes"]
    return {sweep: statistics.mode(sizes[sweep] for sizes in rows) for sweep in SWEEPS}


def _vectors(row: Row) -> int:
    return int(row["sizes"]["tokens"] * row["sizes"]["heads"] * row["sizes"]["batch"])


def _time(row: Row) -> float:
    return float(1e6 * row["measures"]["step"]["ms"] / _vectors(row))


def _bytes(row: Row) -> float:
    return float(2**20 * row["peak_mib"] / _vectors(row))


def _share(row: Row) -> float:
    return _bytes(row) / (2 * 4 * 64)  # q and k of 64 channels in float32


def _not_run(results: Results, suite: str) -> str:
    return f"Not run yet: `comrope bench {suite} --preset {results['preset']}`.\n"


def _how(results: Results, suite: str) -> str:
    machine, runs = results["machine"], results["setting"]["runs"]
    return (
        f"Median of {runs} repetitions, in brackets the smallest and the largest. `comrope bench "
        f"{suite} --preset {results['preset']}`, {machine['device']}, {machine['threads']} "
        f"threads, torch {machine['torch'].split('+')[0]}, {machine['date']}."
    )
