"""Tables in documents made of committed results, ``<!-- NAME: FILE -->`` to ``<!-- end -->``.

``python tests/documents.py`` writes them anew; a test holds them to the results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from comrope.experiments.studies import LABELS
from comrope.experiments.studies.tables import rows, table

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("docs/reproduce.md", "docs/fast.md")
MARKED = re.compile(
    r"<!-- (cost|parameters|training|detection|copying|scaling|study|bench [\w-]+): (\S+) -->\n"
    r".*?<!-- end -->",
    re.DOTALL,
)


def training(results: dict) -> str:
    lines = [
        [
            LABELS[row["method"]],
            f"{row['images_per_second']:,.0f}",
            f"{row['of_vanilla']:.2f}",
        ]
        for row in results["rows"]
    ]
    header = ["method", "images/s", "÷ vanilla"]
    machine = results["machine"]
    return (
        f"{rows(header, lines)}\n`{results['command']}`: {results['model']}; {machine['device']}, "
        f"{machine['cores']} cores, torch {machine['torch']}, {machine['date']}\n"
    )


def detection(results: dict) -> str:
    some = [row["peak_gib"] for row in results["rows"].values()]
    header = ["method", "step, ms", "÷ APE", "kernels, ms", "÷ APE"]
    header += [] if None in some else ["peak memory, GiB", "÷ APE"]
    lines = []
    for method, row in results["rows"].items():
        times = (row["ms"], row["of_first"]), (row["busy_ms"], row["busy_of_first"])
        line = [LABELS[method], *(text for ms, of in times for text in (f"{ms:.1f}", f"{of:.2f}"))]
        if None not in some:
            line += [f"{row['peak_gib']:.2f}", f"{row['peak_of_first']:.2f}"]
        lines.append(line)
    machine = results["machine"]
    return (
        f"{rows(header, lines)}\n`{results['command']}`, {machine['device']}, torch "
        f"{machine['torch']}, {machine['date']}\n"
    )


def cost(results: dict) -> str:
    text = table("cost", results)
    return text[text.index("Time of") :]


def parameters(results: dict) -> str:
    text = table("cost", results)
    return text[text.index("Extra parameters") : text.index("Time of")].rstrip() + "\n"


def study(results: dict) -> str:
    """All that ``comrope reproduce`` wrote into table.md, below its title."""
    return table(results["study"], results).partition("\n\n")[2]


def bench(results: dict, suite: str) -> str:
    """Eager and compiled rows of one name side by side, in times of the suite's baseline.

    Of a suite of several parts the last one: a whole, after what it is made of.
    """
    of_suite = [row for row in results["rows"] if row["suite"] == suite]
    title = of_suite[-1]["part"]
    found: dict[str, dict[bool, dict]] = {}
    for row in of_suite:
        if row["part"] == title and row["measures"] and row["peak_of"]:
            found.setdefault(row["name"], {})[row["compiled"]] = row
    label = next(iter(next(iter(found.values()))[True]["peak_of"]))
    lines = []
    for name, modes in found.items():
        ratios = [
            f"{modes[mode]['measures'][key]['of'][label]:.2f}" if mode in modes else "–"
            for key in ("forward", "step")
            for mode in (False, True)
        ]
        lines.append([name, *ratios, f"{modes[max(modes)]['peak_of'][label]:.2f}"])
    header = ["", "forward, eager", "compiled", "forward + backward, eager", "compiled"]
    machine = results["machine"]
    return (
        f"{rows([*header, 'peak memory'], lines)}\n{title}, in times of *{label}*. "
        f"`comrope bench {suite} --preset {results['preset']}`, {machine['device']}, torch "
        f"{machine['torch']}, triton {machine['triton']}, {machine['date']}.\n"
    )


def copying(results: dict) -> str:
    """Rotations by our kernels: their time, and how much of the speed of copying they reach."""
    lines = []
    for row in results["rows"]:
        precomputed = "precomputed" in row["name"] or row["name"] == "rope-mixed, triton"
        if row["suite"] != "rotation" or not precomputed:
            continue
        measures = (row["measures"][key] for key in ("forward", "backward"))
        told = [f"{1e3 * m['ms']:.0f} µs, {m['fraction_of_copy_bandwidth']:.0%}" for m in measures]
        lines.append([row["name"].split(", ")[0], *told, f"{row['error']:.0e}"])
    (copied,) = (row for row in results["rows"] if row["name"] == "copying memory")
    moved = 2 * results["setting"]["copied_mib"] * 2**20 / copied["measures"]["forward"]["ms"] / 1e9
    header = ["", "forward", "backward, with every gradient", "error"]
    machine = results["machine"]
    return (
        f"{rows(header, lines)}\n{copied['part']}, of the speed of copying ({moved:.2f} TB/s), for "
        f"the bytes that must move. `comrope bench rotation --preset {results['preset']}`, "
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"{machine['date']}.\n"
    )


def scaling(results: dict) -> str:
    """What Tab. 1 would take, from the compiled steps of the paper's ViT, if GPUs add up."""
    seen, together = 200 * 1_281_167, (1, 8, 64)  # images of a run: epochs of ImageNet-1K
    hours = {}
    for row in results["rows"]:
        whole = row["suite"] == "vit" and row["name"] in ("APE", *LABELS) and row["compiled"]
        if whole and row["method"] != "none":
            batch = int(re.search(r"batch (\d+)", row["part"])[1])
            hours[row["method"]] = seen / batch * row["measures"]["step"]["ms"] / 3.6e6
    lines = [[LABELS[m], *(f"{h / gpus:.2g}" for gpus in together)] for m, h in hours.items()]
    all_rows = [f"**{2 * sum(hours.values()) / gpus:.3g}**" for gpus in together]
    lines.append(["**Tab. 1: all, with noise and without**", *all_rows])
    machine = results["machine"]
    return (
        f"{rows(['hours', '1 GPU', '8 GPUs', '64 GPUs'], lines)}\nComputed, not run: 200 epochs, "
        f"forward and backward steps of `comrope bench vit --preset {results['preset']}`, "
        f"{machine['device']}, torch {machine['torch']}, {machine['date']}.\n"
    )


def fill(text: str) -> str:
    """The document with its tables made anew."""

    def make(match: re.Match) -> str:
        results = json.loads((ROOT / match[2]).read_text())
        kind, _, suite = match[1].partition(" ")
        if suite:
            body = bench(results, suite)
        else:
            makers = (cost, parameters, training, detection, copying, scaling, study)
            body = {maker.__name__: maker for maker in makers}[kind](results)
        return f"<!-- {match[1]}: {match[2]} -->\n{body}<!-- end -->"

    return MARKED.sub(make, text)


if __name__ == "__main__":
    for name in DOCUMENTS:
        (ROOT / name).write_text(fill((ROOT / name).read_text()))
