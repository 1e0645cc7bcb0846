"""Scripts of edits to the files of a folder, as JSON: ``[["flip", "a.json", 12, 3], ...]``.

An edit is its name, a file, and its arguments. A place in a file counts from its start and wraps
around, so that every number is valid. Bytes are texts in Latin-1.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuzz import trees
from fuzz.oracles import content_of

__all__ = ["apply", "draw", "parse"]

IMPOSSIBLE = (
    ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError,
)  # fmt: skip
Trees = tuple[Callable[[bytes], Any], Callable[[Any, bytes], bytes]]


def parse(data: bytes) -> list[list[Any]] | None:
    """Return the edits of a script; None if it is no script."""
    try:
        script = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(script, list) or len(script) > 8:
        return None
    return script if all(isinstance(edit, list) and edit for edit in script) else None


def apply(
    script: list[list[Any]], folder: Path, more: Mapping[str, Callable[[Path], None]]
) -> None:
    """Edit the files of a folder; edits that are impossible there have no effect.

    Args:
        script: The edits.
        folder: The folder.
        more: Further edits by name, which have no arguments.
    """
    for name, *arguments in script:
        try:
            if name in more:
                more[name](folder)
            else:
                _apply(name, folder, *arguments)
        except IMPOSSIBLE:
            continue


def _apply(how: str, folder: Path, name: str, *arguments: Any) -> None:
    if not isinstance(name, str) or ".." in name or name.startswith("/"):
        raise ValueError(name)
    path = folder / name
    if how in ON_FILES:
        ON_FILES[how](path, *arguments)
    elif how in ON_BYTES:
        _replace(path, bytes(ON_BYTES[how](bytearray(content_of(path)), *arguments)))
    elif how == "tree":
        read, write = _format_of(path)
        content = content_of(path)
        kind, parts, *value = arguments
        _replace(path, write(trees.change(read(content), kind, tuple(parts), *value), content))
    else:
        raise KeyError(how)


# Edits of bytes.


def _flip(content: bytearray, place: int, bit: int) -> bytearray:
    content[place % len(content)] ^= 1 << bit % 8
    return content


def _cut(content: bytearray, place: int) -> bytearray:
    return content[: place % (len(content) + 1)]


def _put(content: bytearray, place: int, text: str, remove: int = 0) -> bytearray:
    first = place % (len(content) + 1)
    content[first : first + max(0, remove)] = text.encode("latin-1")
    return content


def _repeat(content: bytearray, place: int, length: int) -> bytearray:
    first = place % (len(content) + 1)
    content[first:first] = content[first : first + length % 4096]
    return content


ON_BYTES: dict[str, Callable[..., bytearray]] = {
    "flip": _flip,
    "cut": _cut,
    "put": _put,
    "repeat": _repeat,
}

# Edits of files.


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a new file, never through a link and never into a pipe."""
    _remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _folder(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _pipe(path: Path) -> None:
    _remove(path)
    os.mkfifo(path)


def _link(path: Path, target: str) -> None:
    _remove(path)
    path.symlink_to(target)


def _write(path: Path, text: str) -> None:
    _replace(path, text.encode("latin-1"))


def _copy(path: Path, name: str) -> None:
    if ".." in name or name.startswith("/"):
        raise ValueError(name)
    _replace(path, content_of(path.parent / name))


def _large(path: Path, size: int) -> None:
    _replace(path, content_of(path))
    with path.open("r+b") as file:
        file.truncate(min(abs(size), 2**44))


ON_FILES: dict[str, Callable[..., None]] = {
    "remove": _remove,
    "folder": _folder,
    "pipe": _pipe,
    "link": _link,
    "write": _write,
    "copy": _copy,
    "large": _large,
}

# Trees of files, by suffix.


def _read_lines(content: bytes) -> Any:
    return [trees.parse_json(line) for line in content.decode().splitlines()]


def _write_lines(tree: Any, _: bytes) -> bytes:
    return "".join(f"{trees.dump(line)}\n" for line in tree).encode("utf-8", "replace")


def _read_header(content: bytes) -> Any:
    length = int.from_bytes(content[:8], "little")
    return trees.parse_json(content[8 : 8 + length].decode())


def _write_header(tree: Any, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = trees.dump(tree).encode("utf-8", "replace")
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


FORMATS: dict[str, Trees] = {
    ".json": (
        lambda content: trees.parse_json(content.decode()),
        lambda tree, _: trees.dump(tree).encode("utf-8", "replace"),
    ),
    ".yaml": (
        lambda content: trees.parse_yaml(content.decode()),
        lambda tree, _: trees.dump(tree, yaml=True).encode("utf-8", "replace"),
    ),
    ".jsonl": (_read_lines, _write_lines),
    ".safetensors": (_read_header, _write_header),
}


def _format_of(path: Path) -> Trees:
    if path.name == "state.json":  # one line of JSON, and its digest on the next
        return FORMATS[".jsonl"][0], lambda tree, _: _write_lines(tree[:1], _) + b"0" * 64 + b"\n"
    return FORMATS[path.suffix]


# Random scripts.


def draw(folder: Path, rng: random.Random, more: list[str], size: int = 3) -> list[list[Any]]:
    """Return a script for the files of a folder, which must be unchanged.

    Args:
        folder: The folder.
        rng: The source of the random numbers.
        more: Names of further edits, which follow the others.
        size: The largest number of edits of files.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    script = [
        _draw_edit(folder, rng.choice(files), files, rng) for _ in range(rng.randint(1, size))
    ]
    script += [[name] for name in more if rng.random() < 0.5]
    return script


@functools.cache
def _tree_of(path: Path) -> Any:
    return _format_of(path)[0](path.read_bytes())


def _draw_edit(folder: Path, path: Path, files: list[Path], rng: random.Random) -> list[Any]:
    name, length = path.relative_to(folder).as_posix(), path.stat().st_size
    place = (
        rng.randrange(length or 1) if rng.random() < 0.5 else rng.randrange(min(length, 64) or 1)
    )
    kind = rng.random()
    if kind < 0.55:
        try:
            return ["tree", name, *trees.draw_change(_tree_of(path), rng)]
        except (KeyError, ValueError):
            pass
    text = rng.choice(("", " ", "\n", "\0", "\xff", "x" * 40, "}", "NaN", "\x80\x04", '"', "-"))
    edits: list[list[Any]] = [
        ["flip", name, place, rng.randrange(8)],
        ["flip", name, place, rng.randrange(8)],
        ["cut", name, place],
        ["put", name, place, text, rng.choice((0, len(text), 8))],
        ["put", name, place, "".join(chr(rng.randrange(256)) for _ in range(4)), 4],
        ["repeat", name, place, rng.choice((1, 8, 512))],
        ["write", name, rng.choice(("", "\n", "{}", "[]", "null", "3", "\xff\xfe", "[" * 2000))],
        ["remove", name],
        ["folder", name],
        ["pipe", name],
        ["link", name, rng.choice((path.name, "/dev/zero", "/dev/null", "/proc/self/mem", "none"))],
        ["copy", name, rng.choice(files).name],
        ["large", name, rng.choice((2**20, 2**25, 2**40))],
    ]
    return rng.choice(edits)
