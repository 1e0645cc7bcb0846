"""What a benchmark leaves behind: a table on the terminal, JSON, CSV and a picture."""

from __future__ import annotations

import contextlib
import csv
import io
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
from comrope.experiments.common.figures import STYLES, new_figure, save
from comrope.experiments.common.files import write_text

__all__ = ["described_machine", "draw", "print_tables", "write"]

PACKAGES = ("comrope", "triton", "transformers", "rotary-embedding-torch")
MEASURES = {"forward": "forward", "step": "forward + backward", "backward": "backward"}
COPYING = "share of the speed of copying memory"
WIDTH = 150  # of a table that goes to a file or a pipe
LEGEND = (
    "step: forward and backward; ms: median ± half the distance of the quartiles; error: the "
    "largest relative one in the check before."
)
FEWEST = 3  # bars that a panel has room for
Row = dict[str, Any]


def described_machine(device: torch.device) -> dict[str, Any]:
    """The hardware, versions, date and commit that a number belongs to."""
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
    """Of NVIDIA; the GPUs of a machine share one."""
    said = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.splitlines()[0] if said else None


def _checkout() -> dict[str, Any]:
    """The commit of the package, if its files are tracked, and whether they were changed since."""
    if _said("git", "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    changed = _said("git", "status", "--porcelain", "--", ".")
    return {"commit": _said("git", "rev-parse", "HEAD"), "dirty": changed != ""}


def _said(*command: str) -> str | None:
    """What a command prints, in the folder of the package; None if it fails or is not there."""
    package = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write(results: dict[str, Any], folder: Path) -> None:
    """results.json, results.csv and figure.png, each whole or as it was before."""
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    write_text(folder / "results.csv", _csv(results))
    if any(row["measures"] for row in results["rows"]):
        draw(results, folder / "figure.png")


def _csv(results: dict[str, Any]) -> str:
    """One line a measurement, each with the machine that it belongs to."""
    rows, about = results["rows"], results["machine"]
    ratios = [measure["of"] for row in rows for measure in row["measures"].values()]
    labels = sorted({label for some in (*ratios, *(r["peak_of"] for r in rows)) for label in some})
    shown = ["suite", "part", "name", "method", "backend", "ran", "positions", "compiled"]
    shown += ["status", "reason", "error", "limit"]
    timed = ["ms", "low", "high", "host_ms", "graph", "rounds", "of_copy"]
    where = ["device", "dtype", "date", "commit", "dirty", "torch", "triton", "command"]
    about = {**about, "dtype": results["setting"]["dtype"], "command": results["command"]}
    header = [*shown, "measure", *timed, "peak_mib", *(f"of {label}" for label in labels), *where]
    lines: list[dict[str, Any]] = []
    for row in rows:
        common = {key: row.get(key) for key in shown} | {key: about[key] for key in where}
        for name, measure in row["measures"].items():
            times = {key: measure.get(key) for key in timed}
            lines.append({**common, "measure": name, **times, **_labelled(measure["of"])})
        if row["peak_mib"] is not None:
            peak = {"measure": "peak", "peak_mib": row["peak_mib"]}
            lines.append({**common, **peak, **_labelled(row["peak_of"])})
        if not row["measures"]:
            lines.append(common)
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _labelled(ratios: dict[str, float]) -> dict[str, float]:
    return {f"of {label}": ratio for label, ratio in ratios.items()}


def print_tables(rows: Sequence[Row], console: Console | None = None) -> None:
    """One table a part; below it, what was not timed and why."""
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
    return f"{row['name']}{ran}{', compiled' if row['compiled'] else ''}"


def _columns(rows: Sequence[Row]) -> list[tuple[str, Any]]:
    """Headers, of two lines each, and what each says of a row."""
    both = "forward / step"
    columns: list[tuple[str, Any]] = [
        ("forward\nms", lambda row: _time(row, "forward")),
        ("step\nms", lambda row: _time(row, "step")),
    ]
    measures = [measure for row in rows for measure in row["measures"].values()]
    if any("of_copy" in measure for measure in measures):
        columns.append(("of copying memory\nforward / backward / step", _shares))
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
    shares = [f"{100 * m['of_copy']:.3g}" if "of_copy" in m else "–" for m in found]
    return " / ".join(f"{share:>5}" for share in shares) + " %"


def _ratios(row: Row, label: str) -> str:
    found = [row["measures"].get(key, {}).get("of", {}) for key in ("forward", "step")]
    if not any(label in of for of in found):
        return "–"
    return " / ".join(f"{_number(of.get(label)):>5}" for of in found)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Rows without a time, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] not in ("timed", "parity failed"):
            text = ": ".join(word for word in (row["status"], row.get("reason", "")) if word)
            reasons.setdefault(text, []).append(_name(row))
    return [f"{'; '.join(names)}: {text}" for text, names in reasons.items()]


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of ratios, a row of two panels for each part."""
    parts = []
    for title in dict.fromkeys(row["part"] for row in results["rows"]):
        own = [row for row in results["rows"] if row["part"] == title and row["method"]]
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
    """One bar a row: its share of the speed of copying, or its ratio to the first baseline."""
    shown = [row for row in rows if row["measures"]]
    label, values = _lengths(shown, key)
    whole = label == COPYING
    usual = sorted(values)[max(0, int(0.75 * len(values)) - 1)]
    end = max(values) if whole else min(max(values), max(2.0, 2.5 * usual))
    colors = [STYLES[row["method"]]["color"] for row in shown]
    places = range(len(shown))
    bars = axis.barh(places, [min(value, end) for value in values], color=colors, height=0.75)
    if any(row["compiled"] for row in shown):
        for bar, row in zip(bars, shown, strict=True):
            bar.set_alpha(1.0 if row["compiled"] else 0.45)
    texts = [f"{100 * v:.3g} %" if whole else f"{v:.2f}" for v in values]
    cut = [f"{text} »" if v > end else text for text, v in zip(texts, values, strict=True)]
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axis.bar_label(bars, cut, padding=3, fontsize=8, bbox=plate)
    axis.set_yticks(places, [_name(row) for row in shown], fontsize=8)
    axis.set_ylim(max(len(shown), FEWEST) - 0.4, -0.6)
    if whole:
        axis.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    else:
        axis.axvline(1, color="0.3", linewidth=1)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel(f"{MEASURES[key]}: {label}", fontsize=9)
    axis.set_xlim(0, 1.2 * end)
    axis.spines[["top", "right"]].set_visible(False)


def _lengths(rows: Sequence[Row], key: str) -> tuple[str, list[float]]:
    """What the bars of a panel say, and how long they are."""
    measures = [row["measures"][key] for row in rows]
    if rows[0]["suite"] == "rotation" and all("of_copy" in measure for measure in measures):
        return COPYING, [measure["of_copy"] for measure in measures]
    label = next((name for measure in measures for name in measure["of"]), None)
    if label is None:  # the baseline itself was not timed
        return "ms", [measure["ms"] for measure in measures]
    return f"time, {label} = 1", [measure["of"].get(label, 0.0) for measure in measures]
