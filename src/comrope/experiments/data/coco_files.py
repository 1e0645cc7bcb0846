"""Annotation files in COCO's format: where they are, and whether their content is valid."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from comrope import _json
from comrope._json import ANYTHING, NUMBER, Entries, Items, Kind, Nullable
from comrope.experiments.common.errors import UserError

__all__ = ["collection_paused", "find_split", "read_annotations"]

FOLDERS = {"train": ("train", "train2017"), "val": ("val", "val2017", "validation")}
FARTHEST = 2**31  # coordinates in pixels; products of two are finite
NOT_IN_TEXT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, half characters


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and NOT_IN_TEXT.search(value) is None


def _is_path(value: Any) -> bool:
    """Return whether a value is the path of a file inside a folder, also on Windows."""
    if not _is_text(value):
        return False
    path = PurePosixPath(value.replace("\\", "/"))
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def _is_box(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(NUMBER.accepts(v) and abs(v) < FARTHEST for v in value)
    )


ID = Kind("an integer from 0 to 2^63", lambda value: type(value) is int and 0 <= value < 2**63)
SIDE = Kind("pixels from 1 to 2^31", lambda value: type(value) is int and 1 <= value < FARTHEST)
TEXT = Kind("a text in one line", _is_text)
PATH = Kind("a file in the folder of the images", _is_path)
BOX = Kind("left, top, width and height, four numbers up to 2^31", _is_box)
AREA = Kind("a finite number of at least 0", lambda value: NUMBER.accepts(value) and value >= 0)
FLAG = Kind("0 or 1", lambda value: value in (0, 1))
ENTRIES = {
    "images": Entries({"id": ID, "file_name": PATH, "width": SIDE, "height": SIDE}),
    "categories": Entries({"id": ID, "name": TEXT}),
    "annotations": Entries(
        {"id": ID, "image_id": ID, "category_id": ID, "bbox": BOX},
        {"area": Nullable(AREA), "iscrowd": Nullable(FLAG), "segmentation": ANYTHING},
    ),
}
SINGULAR = {"images": "image", "categories": "category", "annotations": "annotation"}
FILE = Entries(
    {part: Items(ANYTHING, f"a list of {part}") for part in ENTRIES},
    expected="lists of images, annotations and categories",
)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector within the block, which would visit millions of new objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def find_split(root: Path, split: str) -> tuple[Path, Path]:
    """Return the folder of the images of a split, and its annotation file."""
    names = next((some for some in FOLDERS.values() if split in some), (split,))
    for name in dict.fromkeys((split, *names)):
        file = root / "annotations" / f"instances_{name}.json"
        if file.is_file():
            folder = root / name if (root / name).is_dir() else root / "images"
            if not folder.is_dir():
                raise UserError(f"data.root: {root / name} does not exist, the images of {file}")
            return folder, file
    files = sorted(path.name for path in (root / "annotations").glob("*.json"))
    found = ", ".join(files[:5]) or "nothing"
    raise UserError(f"data.root: {root}/annotations has no instances_{split}.json; found {found}")


def read_annotations(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the images, categories and annotations of a file, with the fields that are used.

    An annotation without area has that of its box, and one without the flag ``iscrowd`` has 0.
    Outlines ("segmentation") are not checked.

    Raises:
        UserError: The file cannot be read, or an entry is wrong; the message names both.
    """
    try:
        tree = _json.decode(file.read_bytes())
        _json.check(tree, FILE)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    for part in ENTRIES:
        _check_entries(file, part, tree[part])
        if part != "annotations" and not tree[part]:
            raise UserError(f"{file}: expected {part}, got none")
    _check_names(file, tree["images"])
    _check_references(file, tree)
    for annotation in tree["annotations"]:
        annotation["iscrowd"] = int(annotation.get("iscrowd") or 0)
        if annotation.get("area") is None:
            _, _, width, height = annotation["bbox"]
            annotation["area"] = max(0.0, width) * max(0.0, height)
    fields = {part: [*form.required, *form.optional] for part, form in ENTRIES.items()}
    return {
        part: [{name: entry[name] for name in own if name in entry} for entry in tree[part]]
        for part, own in fields.items()
    }


def _check_entries(file: Path, part: str, entries: list[Any]) -> None:
    schema, seen = ENTRIES[part], set[int]()
    for place, entry in enumerate(entries):
        fault = schema.fault(entry)
        if fault is None and entry["id"] in seen:
            fault = _json.Fault("", f"expected another id, got {entry['id']} twice")
        if fault is not None:
            has_id = fault.where not in ("", "id")
            where = f"{SINGULAR[part]} {entry['id']}" if has_id else f"{part}[{place}]"
            raise UserError(": ".join(filter(None, (str(file), where, *fault))))
        seen.add(entry["id"])


def _check_names(file: Path, images: list[dict[str, Any]]) -> None:
    seen: dict[PurePosixPath, int] = {}
    for image in images:
        first = seen.setdefault(PurePosixPath(image["file_name"]), image["id"])
        if first != image["id"]:
            raise UserError(
                f"{file}: image {image['id']}: file_name: expected another file, got "
                f"{image['file_name']!r}, which is image {first}"
            )


def _check_references(file: Path, tree: dict[str, Any]) -> None:
    known = {
        name: {entry["id"] for entry in tree[part]}
        for name, part in (("image_id", "images"), ("category_id", "categories"))
    }
    for annotation in tree["annotations"]:
        for name, ids in known.items():
            if annotation[name] not in ids:
                raise UserError(
                    f"{file}: annotation {annotation['id']}: {name}: expected an id of the file, "
                    f"got {annotation[name]}"
                )
