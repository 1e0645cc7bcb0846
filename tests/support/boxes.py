"""Data sets in COCO's format, made for the tests."""

from __future__ import annotations

import json
from pathlib import Path

from comrope.experiments.data.boxes import open_boxes


def one_image(root: Path, content: bytes, width: int, height: int, **options):
    """A data set in COCO's format, of one image."""
    (root / "train").mkdir(exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    (root / "train" / "x.jpg").write_bytes(content)
    tree = {
        "images": [{"id": 1, "file_name": "x.jpg", "width": width, "height": height}],
        "categories": [{"id": 1, "name": "cup"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}],
    }
    (root / "annotations" / "instances_train.json").write_text(json.dumps(tree))
    options = {"num_classes": 1, "train": False, **options}
    return open_boxes("coco", str(root), ("train", "train"), **options)[0]
