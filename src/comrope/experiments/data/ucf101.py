"""The layout of UCF-101: class folders of videos, and a list of videos for each split."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath, PureWindowsPath

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.shards import split_names

__all__ = ["Items", "in_folders", "in_list", "list_folder", "training_classes"]

FORMATS = (".avi", ".mp4", ".mkv", ".webm", ".mov")
LISTS = dict.fromkeys(("train", "training"), "trainlist01")
LISTS |= dict.fromkeys(("val", "validation", "valid", "test"), "testlist01")

Items = list[tuple[Path, int]]  # videos and their classes


def list_folder(root: Path) -> Path | None:
    """Return the folder of a data set's lists, or None if there is none."""
    for folder in (root / "splits", root / "ucfTrainTestlist", root):
        if (folder / "classInd.txt").is_file() or any(folder.glob("*list[0-9][0-9].txt")):
            return folder
    return None


def in_list(root: Path, lists: Path, split: str) -> tuple[list[str], Items]:
    """Return the classes of classInd.txt, and the videos of a list."""
    numbers = _class_numbers(lists / "classInd.txt")
    candidates = (root / "videos", root / "UCF-101", root)
    home = next((p for p in candidates if any((p / name).is_dir() for name in numbers)), None)
    if home is None:
        raise UserError(
            f"data.root: expected folders of classes, such as {next(iter(numbers))}, in "
            f"{' or '.join(map(str, candidates))}; found none"
        )
    path = lists / f"{split}.txt"
    items = []
    for where, line in _lines(path if path.is_file() else lists / f"{LISTS.get(split, split)}.txt"):
        video, _, number = line.rpartition(" ")
        if not number.isdecimal():
            video, number = line, ""
        name = PurePosixPath(video.strip().replace("\\", "/"))
        if name.is_absolute() or PureWindowsPath(str(name)).drive or ".." in name.parts:
            raise UserError(f"{where}: expected a path inside the data set, got {line!r}")
        if len(name.parts) < 2 or name.parts[0] not in numbers:
            raise UserError(
                f"{where}: expected CLASS/VIDEO of a class in classInd.txt, got {line!r}"
            )
        expected = numbers[name.parts[0]]
        if number and int(number) != expected:
            raise UserError(
                f"{where}: expected {expected}, the number that {name.parts[0]} has in "
                f"classInd.txt, got {number}"
            )
        items.append((home / name, expected - 1))
    return list(numbers), items


def _class_numbers(path: Path) -> dict[str, int]:
    """Return the classes with their numbers, in the order of the numbers."""
    found: dict[int, str] = {}
    for where, line in _lines(path):
        number, _, name = line.partition(" ")
        if not re.fullmatch("[0-9]+", number) or not name:
            raise UserError(f"{where}: expected a number and a class, got {line!r}")
        if int(number) in found or name.strip() in found.values():
            raise UserError(f"{where}: expected every number and class once, got {line!r} again")
        found[int(number)] = name.strip()
    if max(found) != len(found) or min(found) != 1:
        raise UserError(
            f"{path}: expected numbers from 1 to {len(found)}, got {min(found)} to {max(found)}"
        )
    return {found[number]: number for number in sorted(found)}


def _lines(path: Path) -> list[tuple[str, str]]:
    """Return (file and line number, line) for every line of a list that is not blank."""
    if not path.is_file():
        others = ", ".join(sorted(file.name for file in path.parent.glob("*.txt"))[:8])
        raise UserError(f"data.root: {path} does not exist; found {others or 'no lists'}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    lines = enumerate(text.replace("\t", " ").split("\n"), 1)
    found = [(f"{path}, line {number}", line.strip()) for number, line in lines if line.strip()]
    if not found:
        raise UserError(f"{path}: expected at least one line, got none")
    return found


def training_classes(root: Path, split: str) -> list[str] | None:
    """Return the classes of the training folders, in the order of their indices.

    None for a data set with lists, or without training folders.
    """
    folders = [root / name for name in split_names(split)]
    place = next((path for path in folders if path.is_dir()), None)
    if list_folder(root) is not None or place is None:
        return None
    return sorted(p.name for p in place.iterdir() if p.is_dir() and p.name[0] != ".") or None


def in_folders(root: Path, split: str, classes: list[str] | None) -> tuple[list[str], Items]:
    """Return the classes of a split's folders, and the videos in them."""
    place = next((root / n for n in split_names(split) if (root / n).is_dir()), None)
    if place is None:
        found = ", ".join(sorted(path.name for path in root.iterdir())[:5])
        raise UserError(
            f"data.root: {root} has neither lists such as splits/classInd.txt nor a folder for "
            f"split {split!r}; found {found or 'nothing'}"
        )
    folders = sorted(path for path in place.iterdir() if path.is_dir() and path.name[0] != ".")
    classes = [folder.name for folder in folders] if classes is None else classes
    if unknown := [folder.name for folder in folders if folder.name not in classes]:
        raise UserError(
            f"data.root: split {split!r} of {root} has classes that training does not have: "
            f"{', '.join(unknown[:5])}"
        )
    items: Items = []
    for folder in folders:
        # Skip names that begin with a dot: macOS creates such files in copies.
        files = [p for p in folder.iterdir() if p.suffix.lower() in FORMATS and p.name[0] != "."]
        if not files:
            raise UserError(f"data.root: class {folder.name!r} of split {split!r} has no videos")
        items += [(path, classes.index(folder.name)) for path in sorted(files)]
    if not items:
        raise UserError(f"data.root: expected a folder for every class in {place}, found none")
    return classes, items
