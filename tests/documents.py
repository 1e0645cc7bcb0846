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
DOCUMENTS = ("docs/reproduce.md", "README.md")
MARKED = re.compile(r"<!-- (cost|parameters|training): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


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


def fill(text: str) -> str:
    """The document with its tables made anew."""

    def make(match: re.Match) -> str:
        results = json.loads((ROOT / match[2]).read_text())
        body = {"cost": cost, "parameters": parameters, "training": training}[match[1]](results)
        return f"<!-- {match[1]}: {match[2]} -->\n{body}<!-- end -->"

    return MARKED.sub(make, text)


if __name__ == "__main__":
    for name in DOCUMENTS:
        (ROOT / name).write_text(fill((ROOT / name).read_text()))
