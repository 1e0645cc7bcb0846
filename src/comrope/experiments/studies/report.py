"""A document with the tables and figures of committed runs: written between marks, never by hand.

A mark is ``<!-- reproduce NAME --preset PRESET FIELD=VALUE ... -->``, what the command that trains
the runs would say, and reaches to ``<!-- end -->``. With ``--brief PICTURE`` besides, a study that
can be told briefly is, with its picture there, as seen from the document.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.figures import save
from comrope.experiments.common.files import write_text
from comrope.experiments.studies import plots, tables
from comrope.experiments.studies.fair import brief
from comrope.experiments.studies.gathering import NothingThere
from comrope.experiments.studies.reproduce import Asked, gathered

__all__ = ["report"]

BEGINS = "<!-- reproduce "
MARKED = re.compile(rf"{BEGINS}(?P<asked>[^>]+?) -->\n.*?<!-- end -->", re.DOTALL)
PICTURES = "images"  # beside the document
BRIEFLY = ("comparison",)


class Mark(NamedTuple):
    asked: Asked
    command: str  # that trains the runs
    brief: str | None  # the picture of a study that is told briefly


def report(document: Path, out: Path) -> list[str]:
    """Fill the marks of a document from the runs in ``out / "runs"``; figures go to the folder
    ``images`` beside it. A study without runs says so. Returns what was filled."""
    if not document.is_file():
        raise UserError(f"document: expected a file with marks to fill, got {document}")
    if not (out / "runs").is_dir():
        raise UserError(f"out: expected a folder with runs/, got {out}")
    text = document.read_text()
    marks = {match["asked"]: _mark(match["asked"]) for match in MARKED.finditer(text)}
    begun, ended = text.count(BEGINS), len(MARKED.findall(text))
    if not begun or ended != begun:
        raise UserError(
            f"document: expected marks, {BEGINS}NAME --> to <!-- end -->, in {document}; got "
            f"{begun}, of which {ended} have an end"
        )

    def fill(match: re.Match[str]) -> str:
        said = match["asked"]
        return f"{BEGINS}{said} -->\n{_section(marks[said], document, out)}<!-- end -->"

    write_text(document, MARKED.sub(fill, text))
    return [*marks]


def _section(mark: Mark, document: Path, out: Path) -> str:
    asked = mark.asked
    try:
        results = gathered(asked, out / "runs", mark.command)
    except NothingThere:
        return f"Not run yet: `{mark.command}`.\n"
    if mark.brief is not None:
        save(brief.figure(results), document.parent / mark.brief)
        body, picture = tables.below(brief.table(results), results), mark.brief
    else:
        scale = "" if asked.preset == "small" else f"-{asked.preset}"
        picture = f"{PICTURES}/results-{asked.folder}{scale}.png"
        plots.draw(asked.name, results, document.parent / picture)
        _, _, body = tables.table(asked.name, results).partition("\n\n")
    return f"{body}\n![{results['title']}]({picture})\n"


def _mark(said: str) -> Mark:
    """What a mark says, in the words of the command line."""
    name, *words = shlex.split(said)
    options, fields = {"preset": "small"}, []
    while words:
        word = words.pop(0)
        if word.startswith("--") and words:
            options[word.removeprefix("--")] = words.pop(0)
        else:
            fields.append(word)
    if wrong := options.keys() - {"preset", "seeds", "methods", "brief"}:
        raise UserError(
            "mark: expected --preset, --seeds, --methods, --brief or FIELD=VALUE, got "
            f"--{min(wrong)}"
        )
    picture = options.get("brief")
    if picture is not None and name not in BRIEFLY:
        raise UserError(f"mark: expected --brief of {', '.join(BRIEFLY)} only, got {name}")
    seeds = options.get("seeds")
    if seeds is not None and not seeds.isdecimal():
        raise UserError(f"mark: expected a number of --seeds, got {seeds!r}")
    if name == "cost":
        raise UserError("mark: the study cost has no runs, expected one that trains")
    methods = tuple(filter(None, options.get("methods", "").split(",")))
    asked = Asked(
        name,
        options["preset"],
        seeds=None if seeds is None else int(seeds),
        methods=methods,
        overrides=tuple(fields),
    )
    return Mark(asked, f"comrope reproduce {said.replace(f' --brief {picture}', '')}", picture)
