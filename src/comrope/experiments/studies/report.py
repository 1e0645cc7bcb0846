"""Write tables and figures of committed results into documents, between marks.

A mark is a comment with a command, followed by the table and ``<!-- end -->``::

    <!-- reproduce NAME --preset PRESET FIELD=VALUE ... -->
    <!-- reproduce NAME --from FILE --part PART -->
    <!-- bench TABLE --from FILE -->

The first kind gathers kept runs like the command with these arguments, and has a figure. With
``--brief PICTURE`` it is the short form of a study, whose figure has that path. The other kinds
make a table, or a part of it, from a file of results. Paths are relative to the document.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from comrope._json import TEXT, Entries
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.figures import save
from comrope.experiments.common.files import write_text
from comrope.experiments.common.json_files import read_json
from comrope.experiments.runs.store import FolderStore, open_store
from comrope.experiments.studies import find_study
from comrope.experiments.studies.bench_tables import FIGURES, bench_table
from comrope.experiments.studies.measure import NoRuns, Runs
from comrope.experiments.studies.plan import Request, find_preset
from comrope.experiments.studies.reproduce import existing_results
from comrope.experiments.studies.study import Results, Study
from comrope.experiments.studies.tables import describe_run_of, study_table

__all__ = ["MARK", "fill", "kept_runs", "report"]

BEGIN = re.compile(r"<!-- (?:reproduce|bench) ")
MARK = re.compile(
    r"<!-- (?P<command>(?P<verb>reproduce|bench) [^>]+?) -->\n.*?<!-- end -->", re.DOTALL
)
PICTURES = "images"  # a folder beside the document
RESULTS = Entries({"machine": Entries({"date": TEXT, "torch": TEXT})})  # what all results have
TO_REPEAT = "write it again with the command of the study or benchmark"
OPTIONS = {
    "reproduce": ("preset", "seeds", "methods", "brief", "from", "part"),
    "bench": ("from",),
}


def report(documents: Sequence[Path], results: Path) -> list[str]:
    """Fill the marks of documents; a second time changes nothing.

    Args:
        documents: Markdown files with marks.
        results: The folder with kept runs. A study without runs gets one line.

    Returns:
        The filled marks.
    """
    for document in documents:
        if not document.is_file():
            raise UserError(f"document: expected a file with marks to fill, got {document}")
    found, runs = [], kept_runs(results)
    for document in documents:
        text, sections = fill(document, runs)
        for section in sections.values():
            if section.draw is not None:
                save(section.draw(), document.parent / section.picture)
        write_text(document, text)
        found += [*sections]
    return found


def kept_runs(results: Path) -> Runs:
    """Return the kept runs of a folder."""
    if not results.is_dir():
        raise UserError(f"known: expected a folder with kept runs, got {results}")
    store = open_store(results)
    return Runs(store.path) if isinstance(store, FolderStore) else Runs(results / "runs", store)


class Section(NamedTuple):
    """The text between a mark and its end, and its figure."""

    body: str
    draw: Callable[[], Any] | None = None
    picture: str = ""  # path of the figure


def fill(document: Path, results: Path | Runs) -> tuple[str, dict[str, Section]]:
    """Return the text of a document with its marks filled, and the sections by mark."""
    runs = results if isinstance(results, Runs) else kept_runs(results)
    text = document.read_text(encoding="utf-8")
    matches = [*MARK.finditer(text)]
    begun = len(BEGIN.findall(text))
    if not matches or begun != len(matches):
        raise UserError(
            f"document: expected marks from <!-- reproduce NAME --> to <!-- end --> in {document}; "
            f"got {begun}, of which {len(matches)} have an end"
        )
    commands = [*dict.fromkeys(match["command"] for match in matches)]
    sections = {command: _section(command, document.parent, runs) for command in commands}

    def replace(match: re.Match[str]) -> str:
        command = match["command"]
        return f"<!-- {command} -->\n{sections[command].body}<!-- end -->"

    return MARK.sub(replace, text), sections


def _section(command: str, folder: Path, runs: Runs) -> Section:
    """Return the section of a mark of a document in a folder."""
    verb, name, *words = shlex.split(command)
    options, fields = _split(verb, words)
    if verb == "bench":
        if "from" not in options:
            raise UserError(f"mark: bench {name}: expected --from FILE")
        with _loaded(folder / options["from"]) as results:
            return _from_bench(name, results)
    study = find_study(name)
    if "from" in options:
        with _loaded(folder / options["from"]) as results:
            return Section(_from_file(study, results, options.get("part")))
    if not study.trains:
        raise UserError(f"mark: the study {name} trains no runs; expected --from FILE")
    if "brief" in options and study.brief is None:
        raise UserError(f"mark: --brief: the study {name} has no short form")
    return _from_runs(_request(study, options, fields), command, options.get("brief"), runs)


def _from_bench(name: str, results: Results) -> Section:
    body = bench_table(name, results)
    if name not in FIGURES or not any(row["suite"] == name for row in results["rows"]):
        return Section(body)
    title, figure = FIGURES[name]
    picture = f"{PICTURES}/bench-{name}.png"
    words = title(results).replace("\n", " ")
    return Section(f"{body}\n![{words}]({picture})\n", lambda: figure(results), picture)


def _from_file(study: Study, results: Results, part: str | None) -> str:
    if part is None:
        return study_table(study, results).partition("\n\n")[2]
    if part not in study.parts:
        parts = ", ".join(study.parts) or "none"
        raise UserError(f"mark: --part: expected a part of {study.name} ({parts}), got {part!r}")
    return study.parts[part](results)


def _from_runs(request: Request, command: str, picture: str | None, runs: Runs) -> Section:
    """Return a table and a figure of kept runs; ``picture`` is that of the short form."""
    study = request.study
    command = f"comrope {command}".replace(f" --brief {picture}", "")
    try:
        found = existing_results(request, runs, command)
    except NoRuns:
        return Section(f"Not run yet: `{command}`.\n")
    if picture is not None and study.brief is not None:
        figure, body = study.brief.figure, study.brief.table(found) + describe_run_of(found)
    else:
        scale = "" if request.preset.name == "small" else f"-{request.preset.name}"
        picture = f"{PICTURES}/results-{request.folder}{scale}.png"
        figure, body = study.figure, study_table(study, found).partition("\n\n")[2]
    return Section(f"{body}\n![{found['title']}]({picture})\n", lambda: figure(found), picture)


def _request(study: Study, options: Mapping[str, str], fields: Sequence[str]) -> Request:
    seeds = options.get("seeds")
    if seeds is not None and not seeds.isdecimal():
        raise UserError(f"mark: --seeds: expected a number, got {seeds!r}")
    return Request(
        study,
        find_preset(options.get("preset", "demo")),
        seeds=None if seeds is None else int(seeds),
        methods=tuple(filter(None, options.get("methods", "").split(","))),
        overrides=tuple(fields),
    )


@contextlib.contextmanager
def _loaded(path: Path) -> Iterator[Results]:
    """Yield the results in a file; an entry that a table lacks is an error of the file."""
    try:
        yield read_json(path, RESULTS, TO_REPEAT)
    except FileNotFoundError:
        raise UserError(f"mark: --from: {path} does not exist; {TO_REPEAT}") from None
    except UserError:
        raise
    except Exception as error:  # each table needs other entries: the table is their schema
        raise UserError(
            f"mark: --from: {path}: lacks an entry of the table, or has another form of it "
            f"({type(error).__name__}: {error}); {TO_REPEAT}"
        ) from error


def _split(verb: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return options by name, and the other words."""
    options: dict[str, str] = {}
    fields, left = [], [*words]
    while left:
        word = left.pop(0)
        if word.startswith("--") and left:
            options[word.removeprefix("--")] = left.pop(0)
        else:
            fields.append(word)
    if wrong := options.keys() - set(OPTIONS[verb]):
        valid = ", ".join(f"--{name}" for name in OPTIONS[verb])
        raise UserError(f"mark: expected {valid} or FIELD=VALUE; got --{min(wrong)}")
    return options, fields
