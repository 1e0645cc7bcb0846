"""Small data sets in COCO's format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from PIL import Image

TREE: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "a.png", "width": 100, "height": 80},
        {"id": 3, "file_name": "b.png", "width": 60, "height": 60},
    ],
    "categories": [{"id": 90, "name": "cup"}, {"id": 2, "name": "car"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 90, "bbox": [10, 10, 20, 30]},
        {"id": 2, "image_id": 7, "category_id": 2, "bbox": [90, 70, 40, 40]},
        {"id": 3, "image_id": 7, "category_id": 2, "bbox": [5, 5, 0, 9]},
        {"id": 4, "image_id": 7, "category_id": 2, "bbox": [200, 5, 9, 9]},
        {"id": 5, "image_id": 7, "category_id": 2, "bbox": [0, 0, 9, 9], "iscrowd": 1},
    ],
}
SQUARE = [[10, 10, 30, 10, 30, 40, 10, 40]]


def write_coco(root: Path, content: Any, split: str = "train") -> Path:
    """Write a split: its annotations as a tree, a text or bytes, and the images of ``TREE``."""
    file = root / "annotations" / f"instances_{split}.json"
    file.parent.mkdir(exist_ok=True)
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    (root / split).mkdir(exist_ok=True)
    for image in TREE["images"]:
        size = image["width"], image["height"]
        Image.new("L", size).save(root / split / image["file_name"])
    return root


def changed(**values: Any) -> dict[str, Any]:
    """Return ``TREE`` with other values, such as images__0__id."""
    tree = copy.deepcopy(TREE)
    for place, value in values.items():
        part, number, key = place.split("__")
        tree[part][int(number)][key] = value
    return tree


def with_outline(outline: Any) -> dict[str, Any]:
    """Return one box, (20, 30) at (10, 10), with an outline."""
    return {**TREE, "annotations": [{**TREE["annotations"][0], "segmentation": outline}]}
