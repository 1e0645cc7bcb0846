"""Inputs that are kept as files: the corpus of the repository, and the failures of a run."""

from __future__ import annotations

import gzip
from pathlib import Path

__all__ = ["CORPUS", "failures_in", "kept_inputs", "read_input"]

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "faults" / "corpus"


def kept_inputs(name: str) -> list[Path]:
    """Return the files of a target in the corpus of the repository."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())


def read_input(path: Path) -> bytes:
    """Return an input; files that end with .gz are compressed."""
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def failures_in(folder: Path) -> set[str]:
    """Return the kinds of the failures in a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    return {path.read_text().split("\n")[0] for path in folder.glob("*.txt")}
