"""G2: the numbers in generated tables of documents, in their order.

Words may change, numbers must not. The tables of removed studies may be missing.
"""

from __future__ import annotations

import re
from typing import Any

from guards.compare import differences as compare
from guards.tree import bytes_digest, root

__all__ = ["differences", "observe", "remark"]

DOCUMENTS = ("README.md", "docs/fast.md", "docs/reproduce.md", "docs/results.md")
REGION = re.compile(r"<!-- (?!end )(?P<mark>[^>]+?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
NUMBER = re.compile(r"[-\u2212+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[-+]?\d+)?")
EPOCHS = ("1.25\u00d7 epochs", "a quarter longer")  # of rows: a number that was a word
# Names in marks of tables from files: present name -> first name, if it differs.
MARKS = {
    "algorithm-1": "rotation",
    "cost parameters": "parameters",
    "cost times": "cost",
    **dict.fromkeys(("copying", "detection", "scaling", "training")),
}
# Removed studies.
REMOVED = ("reproduce ablation", "reproduce angles", "reproduce backwards", "reproduce units")


def observe() -> dict[str, Any]:
    """Return mark -> its tables, each with the digest of the text and all numbers."""
    found: dict[str, Any] = {}
    for document in DOCUMENTS:
        for match in REGION.finditer((root() / document).read_text()):
            body = PICTURE.sub("", match["body"]).replace(*EPOCHS)
            numbers = " ".join(text.replace("\u2212", "-") for text in NUMBER.findall(body))
            entry = {"text": bytes_digest(body.encode()), "numbers": numbers}
            found.setdefault(_first_mark(match["mark"]), []).append(entry)
    return found


def _first_mark(mark: str) -> str:
    """Return the first form of a mark: ``bench NAME: FILE``, or ``NAME: FILE`` of a script."""
    verb, name, *words = mark.split()
    options = dict(zip(words[::2], words[1::2], strict=False))
    if "--from" not in options:
        return mark
    name = f"{name} {options['--part']}" if "--part" in options else name
    first = MARKS[name] or name if name in MARKS else f"{verb} {name}"
    return f"{first}: {options['--from'].removeprefix('../')}"


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return marks whose numbers differ. A mark in two documents may be removed from one."""
    lines = []
    for mark, entries in golden.items():
        numbers = [entry["numbers"] for entry in found.get(mark, [])]
        # A brief table repeats another one.
        if not numbers and not mark.startswith(REMOVED) and "--brief" not in mark:
            lines.append(f"{mark}: expected {len(entries)} tables, found none")
        known = [entry["numbers"] for entry in entries]
        lines += [_first_difference(mark, known, some) for some in numbers if some not in known]
    return lines


def remark(golden: dict[str, Any], found: dict[str, Any]) -> str:
    """Return a remark with the number of tables whose words have changed."""
    texts = {entry["text"] for entries in golden.values() for entry in entries}
    other = sum(entry["text"] not in texts for entries in found.values() for entry in entries)
    return f"{other} tables with other words" if other else ""


def _first_difference(mark: str, known: list[str], some: str) -> str:
    best = known[0].split(" ")
    here = some.split(" ")
    pairs = zip(best, here, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(best), len(here)))
    lines = compare(" ".join(best[at : at + 8]), " ".join(here[at : at + 8]), f"{mark}, from {at}")
    return lines[0] if lines else f"{mark}: expected {len(best)} numbers, found {len(here)}"
