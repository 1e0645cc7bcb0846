"""Tables in documents made of committed results, ``<!-- NAME: FILE -->`` to ``<!-- end -->``.

``python tests/documents.py`` writes them anew; a test holds them to the results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from comrope.experiments.studies import LABELS
from comrope.experiments.tables import rows, table

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("docs/reproduce.md", "docs/fast.md", "README.md")
MARKED = re.compile(
    r"<!-- (cost|parameters|training|bench [\w-]+): (\S+) -->\n.*?<!-- end -->", re.DOTALL
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


def cost(results: dict) -> str:
    text = table("cost", results)
    return text[text.index("Time of") :]


def parameters(results: dict) -> str:
    text = table("cost", results)
    return text[text.index("Extra parameters") : text.index("Time of")].rstrip() + "\n"


def bench(results: dict, suite: str) -> str:
    """Eager and compiled rows of one name side by side, in times of the suite's baseline."""
    found: dict[str, dict[bool, dict]] = {}
    for row in results["rows"]:
        if row["suite"] == suite and row["measures"] and row["peak_of"]:
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
    title = {row["part"] for row in results["rows"] if row["suite"] == suite}
    machine = results["machine"]
    return (
        f"{rows([*header, 'peak memory'], lines)}\n{', '.join(title)}, in times of *{label}*. "
        f"`comrope bench {suite} --preset {results['preset']}`, {machine['device']}, torch "
        f"{machine['torch']}, triton {machine['triton']}, {machine['date']}.\n"
    )


def fill(text: str) -> str:
    """The document with its tables made anew."""

    def make(match: re.Match) -> str:
        results = json.loads((ROOT / match[2]).read_text())
        kind, _, suite = match[1].partition(" ")
        if suite:
            body = bench(results, suite)
        else:
            body = {"cost": cost, "parameters": parameters, "training": training}[kind](results)
        return f"<!-- {match[1]}: {match[2]} -->\n{body}<!-- end -->"

    return MARKED.sub(make, text)


if __name__ == "__main__":
    for name in DOCUMENTS:
        (ROOT / name).write_text(fill((ROOT / name).read_text()))
