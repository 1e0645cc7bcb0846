"""A document with the tables and figures of committed runs: written between marks, never by hand.

A mark is ``<!-- reproduce NAME --preset PRESET FIELD=VALUE ... -->``, what the command that trains
the runs would say, and reaches to ``<!-- end -->``. With ``--brief`` besides, a study that has a
short table is told by that, without a picture.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from comrope.experiments import figures
from comrope.experiments.checkpoint import write_atomically
from comrope.experiments.errors import UserError
from comrope.experiments.studies import brief, tables
from comrope.experiments.studies.gathering import NothingThere
from comrope.experiments.studies.reproduce import Asked, gathered

__all__ = ["report"]

BEGINS = "<!-- reproduce "
BRIEF, BRIEFLY = "--brief", {"comparison": brief.table}
MARKED = re.compile(rf"{BEGINS}(?P<asked>[^>]+?) -->\n.*?<!-- end -->", re.DOTALL)
PICTURES = "images"  # beside the document


def report(document: Path, out: Path) -> list[str]:
    """Fill the marks of a document from the runs in ``out / "runs"``; figures go to the folder
    ``images`` beside it. A study without runs says so. Returns what was filled."""
    if not document.is_file():
        raise UserError(f"document: expected a file with marks to fill, got {document}")
    if not (out / "runs").is_dir():
        raise UserError(f"out: expected a folder with runs/, got {out}")
    text = document.read_text()
    marks = {match["asked"]: _asked(match["asked"]) for match in MARKED.finditer(text)}
    begun, ended = text.count(BEGINS), len(MARKED.findall(text))
    if not begun or ended != begun:
        raise UserError(
            f"document: expected marks, {BEGINS}NAME --> to <!-- end -->, in {document}; got "
            f"{begun}, of which {ended} have an end"
        )

    def fill(match: re.Match[str]) -> str:
        said = match["asked"]
        return f"{BEGINS}{said} -->\n{_section(said, marks[said], document, out)}<!-- end -->"

    write_atomically(document, MARKED.sub(fill, text))
    return [*marks]


def _section(said: str, asked: Asked, document: Path, out: Path) -> str:
    words = said.split(" ")
    command = f"comrope reproduce {' '.join(word for word in words if word != BRIEF)}"
    try:
        results = gathered(asked, out / "runs", command)
    except NothingThere:
        return f"Not run yet: `{command}`.\n"
    if BRIEF in words:
        return tables.below(BRIEFLY[asked.name](results), results)
    picture = f"results-{asked.folder}{'' if asked.preset == 'small' else '-' + asked.preset}.png"
    figures.draw(asked.name, results, document.parent / PICTURES / picture)
    _, _, body = tables.table(asked.name, results).partition("\n\n")
    return f"{body}\n![{results['title']}]({PICTURES}/{picture})\n"


def _asked(said: str) -> Asked:
    """What a mark says, in the words of the command line."""
    name, *words = shlex.split(said)
    if BRIEF in words:
        if name not in BRIEFLY:
            raise UserError(f"mark: expected {BRIEF} of {', '.join(BRIEFLY)} only, got {name}")
        words.remove(BRIEF)
    options, fields = {"preset": "small"}, []
    while words:
        word = words.pop(0)
        if word.startswith("--") and words:
            options[word.removeprefix("--")] = words.pop(0)
        else:
            fields.append(word)
    if wrong := options.keys() - {"preset", "seeds", "methods"}:
        raise UserError(
            f"mark: expected --preset, --seeds, --methods or FIELD=VALUE, got --{min(wrong)}"
        )
    seeds = options.get("seeds")
    if seeds is not None and not seeds.isdecimal():
        raise UserError(f"mark: expected a number of --seeds, got {seeds!r}")
    if name == "cost":
        raise UserError("mark: the study cost has no runs, expected one that trains")
    methods = tuple(filter(None, options.get("methods", "").split(",")))
    return Asked(
        name,
        options["preset"],
        seeds=None if seeds is None else int(seeds),
        methods=methods,
        overrides=tuple(fields),
    )
