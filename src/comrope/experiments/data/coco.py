"""Images with boxes in COCO's format."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from comrope.experiments.common.errors import UserError

__all__ = ["Coco", "Target"]

FOLDERS = {"train": ("train", "train2017"), "val": ("val", "val2017", "validation")}


class Target(NamedTuple):
    """The boxes in an image. Labels count from 1, as in torchvision: 0 is the background."""

    boxes: Tensor  # (n, 4), float32: left, top, right, bottom, in pixels
    labels: Tensor  # (n,)
    image_id: int
    outlines: list[Any]  # masks as COCO's compressed run lengths, one per box; empty without masks


class Coco:
    """Images in ``root/SPLIT``, boxes in ``root/annotations/instances_SPLIT.json``.

    Boxes are clipped at the edges of their image. Boxes outside of it and crowds are not used in
    training; ``left_out`` counts them. Evaluation uses the unchanged file, with COCO's own rules.
    An image may have no boxes.

    Loading processes get flat arrays, not the file, which has gigabytes of small objects for COCO.
    """

    def __init__(
        self, root: str | Path, split: str, mode: str = "RGB", *, outlines: bool = False
    ) -> None:
        self.mode = mode
        self.folder, file = _places(Path(root), split)
        self.truth = _read(file)
        categories = sorted(self.truth["categories"], key=lambda category: category["id"])
        self.classes = [str(category["name"]) for category in categories]
        self.category_ids = [category["id"] for category in categories]  # with holes, as in COCO
        images = self.truth["images"]
        self.names = [str(image["file_name"]) for image in images]
        self.ids = np.array([image["id"] for image in images], np.int64)
        self.sizes = np.array([(image["width"], image["height"]) for image in images])
        self.left_out = 0
        self._keep_boxes(outlines)

    def _keep_boxes(self, outlines: bool) -> None:
        label = {number: place for place, number in enumerate(self.category_ids, start=1)}
        own: dict[int, list[Any]] = {int(number): [] for number in self.ids}
        for annotation in self.truth["annotations"]:
            own[annotation["image_id"]].append(annotation)
        boxes, labels, ends, runs = [], [], [0], []
        for number, (width, height) in zip(self.ids.tolist(), self.sizes.tolist(), strict=True):
            for annotation in own[number]:
                outline = _packed(annotation, width, height) if outlines else b""
                box = _inside(annotation["bbox"], width, height)
                if box is None or annotation.get("iscrowd"):
                    self.left_out += 1
                    continue
                boxes.append(box)
                labels.append(label[annotation["category_id"]])
                runs.append(outline)
            ends.append(len(boxes))
        self.boxes = np.array(boxes, np.float32).reshape(-1, 4)
        self.labels, self.ends = np.array(labels, np.int64), np.array(ends)
        self.runs, self.run_ends = b"".join(runs), np.cumsum([0, *map(len, runs)])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "truth": None}

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return str(self.folder / self.names[index])

    def load(self, index: int) -> tuple[Image.Image, Target]:
        """Return the image and its boxes.

        Raises:
            ValueError: The image differs in size from its annotation. Pillow raises other errors if
                it cannot be read.
        """
        with Image.open(self.folder / self.names[index]) as file:
            image = file.convert(self.mode)
        width, height = self.sizes[index].tolist()
        if image.size != (width, height):
            wanted = f"{width} x {height}"
            raise ValueError(f"expected {wanted}, as annotated, got {image.width} x {image.height}")
        return image, self.target(index)

    def target(self, index: int) -> Target:
        """Return the boxes of an image."""
        first, end = self.ends[index : index + 2].tolist()
        boxes, labels = (torch.tensor(part[first:end]) for part in (self.boxes, self.labels))
        size, cuts = self.sizes[index, ::-1].tolist(), self.run_ends[first : end + 1].tolist()
        outlines = [
            {"size": size, "counts": self.runs[a:b]} for a, b in itertools.pairwise(cuts) if a < b
        ]
        return Target(boxes, labels, int(self.ids[index]), outlines)


def _packed(annotation: dict[str, Any], width: int, height: int) -> bytes:
    """Return an outline as compressed run lengths, from polygons or from run lengths."""
    from pycocotools import mask

    outline = annotation.get("segmentation")
    try:
        if not outline:
            raise ValueError("none")
        if isinstance(outline, dict):
            if list(outline["size"]) != [height, width]:
                raise ValueError(f"of size {outline['size']}, the image is {[height, width]}")
            if isinstance(outline["counts"], list):
                outline = mask.frPyObjects(outline, height, width)
            mask.decode(outline)  # raises if it is not one
        else:
            # As usual with COCO, polygons with less than three points are ignored.
            polygons = [part for part in outline if len(part) >= 6 and len(part) % 2 == 0]
            if not polygons:
                raise ValueError("less than three points")
            outline = mask.merge(mask.frPyObjects(polygons, height, width))
    except Exception as error:
        raise UserError(
            f"detect.kind: annotation {annotation['id']} has no valid segmentation ({error}); "
            "expected box, which needs none"
        ) from None
    counts = outline["counts"]
    return counts if isinstance(counts, bytes) else counts.encode()


def _places(root: Path, split: str) -> tuple[Path, Path]:
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


def _read(file: Path) -> dict[str, Any]:
    """Read and check an annotation file; an error names the wrong entry."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    for part in ("images", "annotations", "categories"):
        if not isinstance(tree, dict) or not isinstance(tree.get(part), list):
            raise UserError(f"{file}: expected a list of {part}, as in COCO's files")
    for part, keys in {
        "images": ("id", "file_name", "width", "height"),
        "categories": ("id", "name"),
        "annotations": ("id", "image_id", "category_id", "bbox"),
    }.items():
        _check(file, part, tree[part], keys)
    if not tree["images"] or not tree["categories"]:
        raise UserError(f"{file}: expected images and categories, got none")
    images = {image["id"] for image in tree["images"]}
    categories = {category["id"] for category in tree["categories"]}
    for annotation in tree["annotations"]:
        where = f"{file}: annotation {annotation['id']}"
        if annotation["image_id"] not in images:
            raise UserError(f"{where}: no image {annotation['image_id']!r}")
        if annotation["category_id"] not in categories:
            raise UserError(f"{where}: no category {annotation['category_id']!r}")
        box = annotation["bbox"]
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
            raise UserError(f"{where}: expected a bbox of four numbers, got {box!r}")
        # COCO's own files have these fields, others may not.
        annotation.setdefault("iscrowd", 0)
        if not _is_number(annotation.get("area")):
            annotation["area"] = max(0.0, box[2]) * max(0.0, box[3])
    for image in tree["images"]:
        for side in ("width", "height"):
            if not isinstance(image[side], int) or image[side] < 1:
                raise UserError(
                    f"{file}: image {image['id']}: expected a {side} in pixels, got {image[side]!r}"
                )
        path = PurePosixPath(str(image["file_name"]).replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{file}: expected a file of the data set, got {image['file_name']!r}")
    return tree


def _check(file: Path, part: str, entries: list[Any], keys: tuple[str, ...]) -> None:
    seen = set()
    for number, entry in enumerate(entries):
        missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
        if missing:
            raise UserError(f"{file}: {part}[{number}] has no {missing[0]}")
        own = entry["id"]
        if not isinstance(own, int) or not 0 <= own < 2**63 or own in seen:
            raise UserError(
                f"{file}: {part}[{number}]: expected a unique id from 0 to 2^63, got {own!r}"
            )
        seen.add(entry["id"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _inside(box: list[float], width: int, height: int) -> list[float] | None:
    """Clip a box to the image; return left, top, right, bottom, or None if nothing remains."""
    left, top = box[0], box[1]
    corners = np.clip([left, top, left + box[2], top + box[3]], 0, [width, height] * 2)
    if corners[2] <= corners[0] or corners[3] <= corners[1]:
        return None
    return [float(corner) for corner in corners]
