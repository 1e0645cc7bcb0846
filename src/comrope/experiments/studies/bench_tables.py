"""Tables of documents from the committed files of benchmarks (benchmarks/results)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from comrope.experiments.studies import cpu_tables
from comrope.experiments.studies.gpt_tables import gpt_hours, gpt_tokens
from comrope.experiments.studies.study import METHODS, Results, method_label
from comrope.experiments.studies.tables import markdown_table

__all__ = ["FIGURES", "TABLES", "bench_table"]

EPOCHS, IMAGES = 200, 1_281_167  # per run of Tab. 1, on ImageNet-1K


def bench_table(name: str, results: Results) -> str:
    """Return a table by its name in ``TABLES``, else that of a suite of ``comrope bench``."""
    return TABLES[name](results) if name in TABLES else suite(results, name)


def training(results: Results) -> str:
    """Return the table of images per second in training, by method."""
    lines = [
        [
            method_label(row["method"]),
            f"{row['images_per_second']:,.0f}",
            f"{row['of_vanilla']:.2f}",
        ]
        for row in results["rows"]
    ]
    machine = results["machine"]
    return (
        f"{markdown_table(['method', 'images/s', '÷ vanilla'], lines)}\n`{results['command']}`: "
        f"{results['model']}; {machine['device']}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['date']}\n"
    )


def detection(results: Results) -> str:
    """Return the table of training steps of a detector, by method."""
    has_memory = None not in [row["peak_gib"] for row in results["rows"].values()]
    header = ["method", "step, ms", "÷ APE", "kernels, ms", "÷ APE"]
    header += ["peak memory, GiB", "÷ APE"] if has_memory else []
    lines = []
    for method, row in results["rows"].items():
        times = (row["ms"], row["of_first"]), (row["busy_ms"], row["busy_of_first"])
        line = [method_label(method), *(t for ms, of in times for t in (f"{ms:.1f}", f"{of:.2f}"))]
        if has_memory:
            line += [f"{row['peak_gib']:.2f}", f"{row['peak_of_first']:.2f}"]
        lines.append(line)
    machine = results["machine"]
    return (
        f"{markdown_table(header, lines)}\n`{results['command']}`, {machine['device']}, torch "
        f"{machine['torch']}, {machine['date']}\n"
    )


def suite(results: Results, name: str) -> str:
    """Return the table of a suite's last part, relative to its baseline.

    One line has the eager and the compiled row of a name.
    """
    of_suite = [row for row in results["rows"] if row["suite"] == name]
    title = of_suite[-1]["part"]
    found: dict[str, dict[bool, dict[str, Any]]] = {}
    for row in of_suite:
        if row["part"] == title and row["measures"] and row["peak_of"]:
            found.setdefault(row["name"], {})[row["compiled"]] = row
    baseline = next(iter(next(iter(found.values()))[True]["peak_of"]))
    lines = []
    for label, modes in found.items():
        ratios = [
            f"{modes[mode]['measures'][key]['of'][baseline]:.2f}" if mode in modes else "–"
            for key in ("forward", "step")
            for mode in (False, True)
        ]
        lines.append([label, *ratios, f"{modes[max(modes)]['peak_of'][baseline]:.2f}"])
    header = ["", "forward, eager", "compiled", "forward + backward, eager", "compiled"]
    return (
        f"{markdown_table([*header, 'peak memory'], lines)}\n{title}, in times of *{baseline}*. "
        f"`comrope bench {name} --preset {results['preset']}`, {_versions(results)}.\n"
    )


def copying(results: Results) -> str:
    """Return the table of rotations by our kernels: time, and share of the copy bandwidth."""
    lines = []
    for row in results["rows"]:
        precomputed = "precomputed" in row["name"] or row["name"] == "rope-mixed, triton"
        if row["suite"] != "rotation" or not precomputed:
            continue
        found = [row["measures"][key] for key in ("forward", "backward")]
        shares = (m["fraction_of_copy_bandwidth"] for m in found)
        times = [f"{1e3 * m['ms']:.0f} µs, {s:.0%}" for m, s in zip(found, shares, strict=True)]
        lines.append([row["name"].split(", ")[0], *times, f"{row['error']:.0e}"])
    (copied,) = (row for row in results["rows"] if row["name"] == "copying memory")
    moved = 2 * results["setting"]["copied_mib"] * 2**20 / copied["measures"]["forward"]["ms"] / 1e9
    header = ["", "forward", "backward, with every gradient", "error"]
    return (
        f"{markdown_table(header, lines)}\n{copied['part']}; shares of the speed of copying "
        f"({moved:.2f} TB/s), for the bytes that must move. `comrope bench rotation --preset "
        f"{results['preset']}`, {_versions(results)}.\n"
    )


def scaling(results: Results) -> str:
    """Return the table of GPU hours for Tab. 1, from compiled steps and perfect scaling."""
    gpus, hours = (1, 8, 64), {}
    for row in results["rows"]:
        is_vit = row["suite"] == "vit" and row["name"] in ("APE", *METHODS) and row["compiled"]
        if is_vit and row["method"] != "none":
            batch = re.search(r"batch (\d+)", row["part"])
            assert batch is not None
            steps = EPOCHS * IMAGES / int(batch[1])
            hours[row["method"]] = steps * row["measures"]["step"]["ms"] / 3.6e6
    lines = [[method_label(m), *(f"{h / n:.2g}" for n in gpus)] for m, h in hours.items()]
    all_rows = [f"**{2 * sum(hours.values()) / n:.3g}**" for n in gpus]
    lines.append(["**Tab. 1: all, with and without perturbation**", *all_rows])
    machine = results["machine"]
    header = ["hours", "1 GPU", "8 GPUs", "64 GPUs"]
    return (
        f"{markdown_table(header, lines)}\nComputed, not run: {EPOCHS} epochs, forward and "
        f"backward steps of `comrope bench vit --preset {results['preset']}`, "
        f"{machine['device']}, torch {machine['torch']}, {machine['date']}.\n"
    )


def algorithm_1(results: Results) -> str:
    """Return the table of the spectral backend and the paper's Algorithm 1."""
    header = ["method", "positions", "Algorithm 1", "spectral", "ratio", "peak memory", "error"]
    lines = []
    for row in results["rows"]:
        times, peak = row["milliseconds"], row["peak_mib"]
        memory = f"{peak['reference']:.0f} → {peak['spectral']:.0f} MiB"
        both = [f"{times[backend]:.0f} ms" for backend in ("reference", "spectral")]
        name = [f"`{row['method']}`", row["positions"]]
        lines.append([*name, *both, f"{row['ratio']:.1f}x", memory, f"{row['error']:.0e}"])
    machine = results["machine"]
    return (
        f"{markdown_table(header, lines)}\n`python benchmarks/rotation.py`, {machine['cpu']}, "
        f"{machine['threads']} threads, torch {machine['torch'].split('+')[0]}, "
        f"{machine['date']}.\n"
    )


def precision(results: Results) -> str:
    """Return the table of errors of scores against the distance of positions from the origin."""
    in_float64 = {
        (row["method"], row["init"]): max(row["scores"])
        for row in results["rows"]
        if row["positions"] == "float64"
    }
    lines = []
    for row in results["rows"]:
        if row["positions"] == "float32":
            others = max(row["lengths"]), in_float64[row["method"], row["init"]]
            errors = [f"{error:.0e}" for error in (*row["scores"], *others)]
            lines.append([f"`{row['method']}`", row["init"], *errors])
    distances = [f"{distance:.0e}" for distance in results["distances"]]
    header = ["method", "init", *distances, "length", "float64 positions"]
    machine = results["machine"]
    return (
        f"{markdown_table(header, lines)}\n`python benchmarks/precision.py`, {machine['device']}, "
        f"torch {machine['torch']}, {machine['date']}.\n"
    )


def _versions(results: Results) -> str:
    machine = results["machine"]
    return (
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"{machine['date']}"
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "training": training,
    "detection": detection,
    "copying": copying,
    "scaling": scaling,
    "gpt": gpt_tokens,
    "gpt-hours": gpt_hours,
    "algorithm-1": algorithm_1,
    "precision": precision,
    "layer": cpu_tables.layer,
    "step": cpu_tables.step,
    "decode": cpu_tables.decode,
    "sizes": cpu_tables.sizes,
}
# Titles and figures of tables that have one.
FIGURES: dict[str, tuple[Callable[[Results], str], Callable[[Results], Any]]] = {
    "sizes": (cpu_tables.sizes_title, cpu_tables.sizes_figure),
}
