"""Files and folders of data sets: regular files only, and no links in a circle."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from comrope.experiments.common.errors import UserError

__all__ = ["check_bytes", "check_links", "file_size", "shown", "walk"]

MAX_BYTES = 2**30  # of an image: some decoders read the whole file
MAX_VISITS = 100  # of one folder, through links


def file_size(path: str | Path) -> int:
    """Return the size of a regular file, in bytes.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is a folder, a pipe or a device. Opening a pipe would wait for its writer.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise FileNotFoundError("no such file") from None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a file, but a folder, a pipe or a device")
    return found.st_size


def check_bytes(size: int) -> None:
    """Raise ValueError if a file is empty, or too large for an image."""
    if not size:
        raise ValueError("an empty file")
    if size > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES:,} bytes, got {size:,}")


def shown(name: str) -> str:
    """Return a name for messages: on one line, without what controls a terminal."""
    return name if name.isprintable() else repr(name)


def walk(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder from ``top`` on, the names of its folders, and those of its other entries.

    Links to folders are followed.

    Raises:
        UserError: A link leads to a folder that it is in, or a folder cannot be read.
    """
    # A folder, its place without links, and the places of the links that led to it.
    waiting: list[tuple[str, str, tuple[str, ...]]] = [(top, os.path.realpath(top), ())]
    visits: Counter[str] = Counter()
    while waiting:
        folder, place, links = waiting.pop()
        folders, others = [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not _is_folder(entry):
                        others.append(entry.name)
                        continue
                    folders.append(entry.name)
                    if entry.is_symlink():
                        passed = (*links, place)
                        target = _target(entry.path, passed, visits)
                        waiting.append((entry.path, target, passed))
                    else:
                        waiting.append((entry.path, os.path.join(place, entry.name), links))
        except OSError as error:
            raise UserError(f"data.root: {shown(folder)} cannot be read ({error})") from None
        yield folder, folders, others


def check_links(top: str) -> None:
    """Raise if a link leads to a folder that it is in; see ``walk``."""
    for _ in walk(top):
        pass


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _target(link: str, passed: tuple[str, ...], visits: Counter[str]) -> str:
    """Return the folder that a link leads to.

    Args:
        link: The path of the link.
        passed: The folders of this link and of those that led to it, without links.
        visits: How often links led to each folder; counted here.
    """
    target = os.path.realpath(link)
    if any(os.path.commonpath((target, folder)) == target for folder in passed):
        raise UserError(
            f"data.root: {shown(link)} is a link to {shown(target)}, a folder that contains it; "
            "its images would count many times, remove the link"
        )
    visits[target] += 1
    if visits[target] > MAX_VISITS:
        raise UserError(
            f"data.root: {shown(link)} is one of more than {MAX_VISITS} links to "
            f"{shown(target)}; remove the links"
        )
    return target
