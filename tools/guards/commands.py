"""G10: the command line: verbs with their options, and what an error names.

Prose is free to change. New verbs and options are no difference.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["differences", "observe"]

# Commands that print one line to standard error, which begins with the wrong argument.
ERRORS = (
    "train nosuch",
    "train nosuch.yaml",
    "train digits train.epoch=3",
    "train digits train.epochs=many",
    "train digits train.epochs",
    "train digits model.position=nosuch",
    "train digits model.block_size=7",
    "train digits optim.schedule=nosuch",
    "train digits --out FILE",
    "train digits_finetune",
    "train imagenette --data NOWHERE data.workers=0",
    "eval NOWHERE",
    "inspect NOWHERE",
    "export NOWHERE --to onnx --out model.onnx",
    "recipes nosuch",
    "report NOWHERE",
    "bench nosuch",
    "reproduce nosuch",
    "reproduce classification --preset nosuch",
    "reproduce classification --methods nosuch",
    "reproduce classification --gather",
    "reproduce classification model.position=ape",
    "reproduce cost --gather",
)
USAGE = ("nosuch", "train", "train digits --nosuch", "reproduce classification --seeds 0")


def observe() -> dict[str, Any]:
    """Return verb -> arguments and options, and command -> exit code and what is named."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("FILE").touch()
            errors = {command: _error(command) for command in ERRORS}
            usage = {command: _called(command)[0] for command in USAGE}
        finally:
            os.chdir(before)
    return {"verbs": _verbs(), "help": _called("--help")[0], "errors": errors, "usage": usage}


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return verbs and options that are gone, and errors that differ."""
    lines = []
    for verb, words in golden["verbs"].items():
        gone = [word for word in words if word not in found["verbs"].get(verb, ())]
        lines += [f"comrope {verb}: expected {word}, found nothing" for word in gone]
    if found["help"] != golden["help"]:
        lines.append(f"comrope --help: expected exit code {golden['help']}, found {found['help']}")
    for part in ("errors", "usage"):
        for command, expected in golden[part].items():
            if (here := found[part][command]) != expected:
                lines.append(f"comrope {command}: expected {expected}, found {here}")
    return lines


def _verbs() -> dict[str, list[str]]:
    import typer

    from comrope.experiments.cli import app

    group: Any = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        arguments = [p.name for p in command.params if p.param_type_name == "argument"]
        options = [o for p in command.params for o in (*p.opts, *p.secondary_opts)]
        found[name] = [*arguments, *sorted(o for o in options if o.startswith("-"))]
    return found


def _error(command: str) -> str:
    """The exit code, and the field or argument that a single line begins with."""
    code, text = _called(command)
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1 or not lines[0].startswith("comrope: "):
        return f"{code}, {len(lines)} lines"
    head = lines[0].removeprefix("comrope: ").partition(": ")[0]
    words = re.findall(r"[\w.=/-]+", head)
    return f"{code}, {words[0] if words else ''}"


class _Text(io.StringIO):
    """Text in memory where code asks for a file's number."""

    def fileno(self) -> int:
        return 2


def _called(command: str) -> tuple[int | str | None, str]:
    from comrope.experiments.cli import main

    before, errors = sys.argv, _Text()
    sys.argv = ["comrope", *command.split()]
    os.environ.setdefault("COLUMNS", "80")
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as left:
        return left.code, errors.getvalue()
    finally:
        sys.argv = before
    return 0, errors.getvalue()
