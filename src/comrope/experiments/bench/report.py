"""Output of a benchmark: tables on the terminal, results.json, figure.png."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from comrope.experiments.common.console import machine
from comrope.experiments.common.figures import new_figure, save, style_of
from comrope.experiments.common.files import write_text

__all__ = ["described_machine", "draw", "print_tables", "write"]

PACKAGES = ("comrope", "triton", "transformers", "rotary-embedding-torch", "x-transformers")
MEASURES = {"forward": "forward", "step": "forward + backward", "backward": "backward"}
COPYING = "fraction of the copy bandwidth"
WIDTH = 150  # of a table that is written to a file or a pipe
LEGEND = (
    "step: forward and backward; ms: median ± half the distance of the quartiles; error: the "
    "largest relative one in the check before."
)
FEWEST = 3  # a panel has at least the height of so many bars
Row = dict[str, Any]


def described_machine(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions, date and commit."""
    about: dict[str, Any] = dict(machine(device))
    for package in PACKAGES:
        about[package] = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package)
    about |= {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
    }
    return about | _checkout()


def _driver() -> str | None:
    """Return the version of NVIDIA's driver."""
    output = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


def _checkout() -> dict[str, Any]:
    """Return the commit of the package, and whether its files differ from it."""
    if _output_of("git", "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    changed = _output_of("git", "status", "--porcelain", "--", ".")
    return {"commit": _output_of("git", "rev-parse", "HEAD"), "dirty": changed != ""}


def _output_of(*command: str) -> str | None:
    """Return the output of a command in the package folder; None if it fails."""
    package = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write(results: dict[str, Any], folder: Path) -> None:
    """Write results.json and figure.png, each atomically."""
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    if any(row["measures"] for row in results["rows"]):
        draw(results, folder / "figure.png")


def print_tables(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print a table for each part; below it, the rows without times and the reasons."""
    out = console or Console(highlight=False)
    if not out.is_terminal:
        out.width = max(out.width, WIDTH)
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        out.print(_table(part, own))
        for line in _left_out(own):
            out.print(line, markup=False, soft_wrap=True)
        out.print()
    out.print(LEGEND, soft_wrap=True)


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("error", no_wrap=True, min_width=5)
    columns = _columns(rows)
    for header, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        if row["status"] == "timed":
            values = [cell(row) for _, cell in columns]
            table.add_row(_name(row), f"{row['error']:.0e}", *values)
        elif row["status"] == "parity failed":
            table.add_row(_name(row), f"[red]parity failed ({row['error']:.1e})[/red]")
    return table


def _name(row: Row) -> str:
    ran = f" ({row['ran']})" if row["backend"] == "auto" and row["ran"] else ""
    sizes = "".join(f", {size} {key}" for key, size in row.get("sizes", {}).items())
    return f"{row['name']}{ran}{', compiled' if row['compiled'] else ''}{sizes}"


def _columns(rows: Sequence[Row]) -> list[tuple[str, Any]]:
    """Return headers of two lines each, with functions from a row to a table cell."""
    both = "forward / step"
    columns: list[tuple[str, Any]] = [
        ("forward\nms", lambda row: _time(row, "forward")),
        ("step\nms", lambda row: _time(row, "step")),
    ]
    measures = [measure for row in rows for measure in row["measures"].values()]
    if any("fraction_of_copy_bandwidth" in measure for measure in measures):
        columns.append(("of copy bandwidth\nforward / backward / step", _shares))
    for label in dict.fromkeys(label for measure in measures for label in measure["of"]):
        columns.append((f"÷ {label}\n{both}", lambda row, label=label: _ratios(row, label)))
    if any(row["peak_mib"] for row in rows):
        columns.append(("peak\nMiB", lambda row: f"{row['peak_mib']:,.0f}"))
        label = next((label for row in rows for label in row["peak_of"]), "")
        columns.append((f"peak\n÷ {label}", lambda row: _number(row["peak_of"].get(label))))
    return columns


def _time(row: Row, key: str) -> str:
    if (measure := row["measures"].get(key)) is None:
        return "–"
    spread = (measure["high"] - measure["low"]) / 2 / measure["ms"]
    return f"{measure['ms']:.3g} ±{100 * spread:2.0f}%"


def _shares(row: Row) -> str:
    found = [row["measures"].get(key, {}) for key in ("forward", "backward", "step")]
    shares = [
        f"{100 * m['fraction_of_copy_bandwidth']:.3g}" if "fraction_of_copy_bandwidth" in m else "–"
        for m in found
    ]
    return " / ".join(f"{share:>5}" for share in shares) + " %"


def _ratios(row: Row, label: str) -> str:
    found = [row["measures"].get(key, {}).get("of", {}) for key in ("forward", "step")]
    if not any(label in of for of in found):
        return "–"
    return " / ".join(f"{_number(of.get(label)):>5}" for of in found)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Return lines about rows without times, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] not in ("timed", "parity failed"):
            text = ": ".join(word for word in (row["status"], row.get("reason", "")) if word)
            reasons.setdefault(text, []).append(_name(row))
    return [f"{'; '.join(names)}: {text}" for text, names in reasons.items()]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw bars of ratios, with two panels for each part."""
    parts = []
    for title in dict.fromkeys(row["part"] for row in results["rows"]):
        own = [row for row in results["rows"] if row["part"] == title and row["method"]]
        own = [row for row in own if "sizes" not in row]
        if any(row["measures"] for row in own):
            parts.append((title, own))
    if not parts:
        return
    counts = [sum(bool(row["measures"]) for row in rows) for _, rows in parts]
    heights = [0.9 + 0.22 * max(count, FEWEST) for count in counts]
    figure, axes = new_figure(2, len(parts), width=6.6, height=sum(heights) / len(parts))
    axes[0, 0].get_gridspec().set_height_ratios(heights)
    for (left, right), (title, rows) in zip(axes, parts, strict=True):
        _bars(left, rows, "forward")
        _bars(right, rows, "step")
        left.set_title(title, fontsize=10, loc="left", fontweight="bold")
        right.set_yticklabels([])
    about = results["machine"]
    commit = (about["commit"] or "no commit")[:9] + (" and changes" if about["dirty"] else "")
    modes = "; pale: eager, full: compiled" if results["setting"]["compile"] else ""
    text = f"{about['device']}, torch {about['torch']}, {about['date']}, {commit}{modes}"
    figure.suptitle(text, fontsize=10)
    save(figure, path)


def _bars(axis: Any, rows: Sequence[Row], key: str) -> None:
    """Draw one bar per row: the fraction of the copy bandwidth, or the ratio to a baseline."""
    shown = [row for row in rows if row["measures"]]
    label, values = _lengths(shown, key)
    is_share = label == COPYING
    usual = sorted(values)[max(0, int(0.75 * len(values)) - 1)]
    end = max(values) if is_share else min(max(values), max(2.0, 2.5 * usual)) or 1.0
    colors = [style_of(row["method"])["color"] for row in shown]
    places = range(len(shown))
    bars = axis.barh(places, [min(value, end) for value in values], color=colors, height=0.75)
    if any(row["compiled"] for row in shown):
        for bar, row in zip(bars, shown, strict=True):
            bar.set_alpha(1.0 if row["compiled"] else 0.45)
    texts = [f"{100 * v:.3g} %" if is_share else f"{v:.2f}" if v else "" for v in values]
    labels = [f"{text} »" if v > end else text for text, v in zip(texts, values, strict=True)]
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axis.bar_label(bars, labels, padding=3, fontsize=8, bbox=background)
    axis.set_yticks(places, [_name(row) for row in shown], fontsize=8)
    axis.set_ylim(max(len(shown), FEWEST) - 0.4, -0.6)
    if is_share:
        axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    else:
        axis.axvline(1, color="0.3", linewidth=1)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel(f"{MEASURES[key]}: {label}", fontsize=9)
    axis.set_xlim(0, 1.2 * end)
    axis.spines[["top", "right"]].set_visible(False)


def _lengths(rows: Sequence[Row], key: str) -> tuple[str, list[float]]:
    """Return the label and the lengths of a panel's bars."""
    measures = [row["measures"].get(key, {}) for row in rows]  # empty: not measured, no bar
    if rows[0]["suite"] == "rotation" and all(
        "fraction_of_copy_bandwidth" in measure for measure in measures
    ):
        return COPYING, [measure["fraction_of_copy_bandwidth"] for measure in measures]
    label = next((name for measure in measures for name in measure.get("of", {})), None)
    if label is None:  # the baseline itself was not timed
        return "ms", [measure.get("ms", 0.0) for measure in measures]
    return f"time, {label} = 1", [measure.get("of", {}).get(label, 0.0) for measure in measures]
