"""Annotations in COCO's format, with outlines."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.coco import Coco
from comrope.experiments.tasks.coco_metrics import metrics
from fuzz import trees
from fuzz.judge import require
from fuzz.oracles import read_runs
from fuzz.target import Target, mutate_text

__all__ = ["Fuzz"]

SIZES = ((12, 10), (7, 30))  # width and height
SQUARE = [[2, 2, 8, 2, 8, 6, 2, 6]]
RUNS = {"size": [10, 12], "counts": [22, 4, 6, 4, 84]}
PACKED = {"size": [30, 7], "counts": "Z14b01O0T4"}
MOST_PIXELS = 2**20


def _annotation(number: int, image: int, outline: Any, **more: Any) -> dict[str, Any]:
    usual = {"bbox": [2, 2, 6, 4], "area": 24, "iscrowd": 0, "category_id": 3}
    return {"id": number, "image_id": image, "segmentation": outline, **usual, **more}


class Fuzz(Target):
    errors = (UserError,)

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        (folder / "train").mkdir(parents=True, exist_ok=True)
        (folder / "annotations").mkdir(exist_ok=True)
        for number, size in enumerate(SIZES):
            Image.new("RGB", size).save(folder / "train" / f"{number}.png")

    def seeds(self) -> list[bytes]:
        images = [
            {"id": number, "file_name": f"{number}.png", "width": w, "height": h}
            for number, (w, h) in enumerate(SIZES)
        ]
        categories = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog", "supercategory": "pet"}]
        annotations = [
            [_annotation(1, 0, SQUARE)],
            [_annotation(5, 0, RUNS, iscrowd=1), _annotation(6, 0, SQUARE, category_id=7)],
            [_annotation(1, 1, [[1.5, 1.5, 5, 3, 2, 20.5], *SQUARE], bbox=[1, 1, 5, 20])],
            [],
        ]
        whole = [
            {"images": images, "annotations": a, "categories": categories} for a in annotations
        ]
        return [json.dumps(one).encode() for one in whole]

    def examine(self, data: bytes) -> bool:
        file = self.folder / "annotations" / "instances_train.json"
        file.write_bytes(data)
        with self.watched():
            answer = self.ask(lambda: Coco(self.folder, "train", outlines=True), file)
            if not answer.accepted:
                return False
            source: Coco = answer.value
            self._judge(source)
            again = Coco(self.folder, "train", outlines=True)
        for number in range(len(source)):
            a, b = source.target(number), again.target(number)
            same = str(a.outlines) == str(b.outlines) and a.boxes.equal(b.boxes)
            require(same, "silent: another outline at every reading")
        tree = json.loads(data)
        _judge_counts(tree, source)
        _judge_masks(tree, source)
        return True

    def _judge(self, source: Coco) -> None:
        found = []
        for number in range(len(source)):
            width, height = (int(side) for side in source.sizes[number])
            target = source.target(number)
            boxes = target.boxes
            require(bool(boxes.isfinite().all()), "silent: a box that is not finite")
            if len(boxes):
                inside = (
                    boxes.amin() >= 0 and (boxes <= boxes.new_tensor([width, height] * 2)).all()
                )
                require(bool(inside), "silent: a box outside of its image", boxes)
                require(bool((boxes[:, 2:] > boxes[:, :2]).all()), "silent: an empty box", boxes)
                labels = (int(target.labels.min()), int(target.labels.max()))
                require(1 <= labels[0] <= labels[1] <= len(source.classes), "silent: a label")
            require(len(target.outlines) == len(boxes), "silent: boxes without outlines")
            for outline in target.outlines:
                _judge_outline(outline, width, height)
            left_top = np.asarray(boxes[:, :2])
            sides = np.asarray(boxes[:, 2:] - boxes[:, :2])
            found += [
                {
                    "image_id": target.image_id,
                    "category_id": source.category_ids[int(label) - 1],
                    "score": 0.5,
                    "bbox": [float(n) for n in (*corner, *side)],
                }
                for corner, side, label in zip(left_top, sides, target.labels, strict=True)
            ]
        self.ask(lambda: metrics(source.truth, found))

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.7:
            return mutate_text(data, rng)
        try:
            tree = trees.parse_json(data.decode())
            place = rng.randrange(len(trees.get(tree, ("annotations",))))
            path = ("annotations", place, "segmentation")
            return trees.dump(trees.change(tree, "set", path, _outline(rng))).encode()
        except (ValueError, KeyError, TypeError, RecursionError):
            return mutate_text(data, rng)


def _judge_outline(outline: Any, width: int, height: int) -> None:
    from pycocotools import mask

    counts = outline["counts"]
    runs = read_runs(counts if isinstance(counts, bytes) else counts.encode())
    require(list(outline["size"]) == [height, width], "silent: an outline of another size")
    require(min(runs) >= 0, "silent: negative run lengths", runs)
    require(sum(runs) == width * height, "silent: run lengths do not fill the image", runs)
    if width * height <= MOST_PIXELS:
        require(int(mask.decode(outline).max()) <= 1, "silent: a mask of other values")
    require(sum(runs[1::2]) > 0, "silent: an empty mask", runs)


def _judge_counts(tree: dict[str, Any], source: Coco) -> None:
    """Require that every annotation is used or counted."""
    used = sum(len(source.target(number).boxes) for number in range(len(source)))
    left_out = sum(map(len, source.left_out.values()))
    require(used + left_out == len(tree["annotations"]), "silent: annotations are left out")
    require(len(source) == len(tree["images"]), "silent: images are left out")


def _judge_masks(tree: dict[str, Any], source: Coco) -> None:
    """Require that run lengths in the file and those used have the same pixels."""
    for written, used in zip(tree["annotations"], source.truth["annotations"], strict=True):
        outline = written.get("segmentation")
        if isinstance(outline, dict):
            counts = outline["counts"]
            own = counts if isinstance(counts, list) else read_runs(counts.encode())
            packed = read_runs(used["segmentation"]["counts"])
            if sum(own) <= MOST_PIXELS:
                same = np.array_equal(_pixels(own), _pixels(packed))
                require(same, "silent: another mask", written)


def _pixels(runs: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(runs)) % 2, runs)


OUTLINES = (
    "@raw:[[5,5,25,5,NaN,25,5,25]]", [[1e30, 5, 6, 5, 6, 6]], [[-1e9, 5, 25, 5, 25, 25]],
    {"size": [10, 12], "counts": [1]}, {"size": [10, 12], "counts": "garbage"}, PACKED,
    {"size": [10, 12], "counts": []}, {"size": [10, 12], "counts": [2**32, 5]}, [[1, 1, 1, 1]],
    {"size": [10, 12], "counts": [120]}, {"size": [10, 12], "counts": [-1, 121]}, [[]], [[[1]]],
    {"size": [10, 12], "counts": [60.5, 59.5]}, {"size": [10, 12], "counts": [True, 119]}, [7] * 6,
    {"size": [2**20, 2**20], "counts": [2**40]}, {"size": [10, 12], "counts": "\x7f\x7f\x7f"},
)  # fmt: skip


def _outline(rng: random.Random) -> Any:
    return trees.parse_json(trees.dump(_tree(rng.choice(OUTLINES))))


def _tree(value: Any) -> Any:
    return trees.Pairs(value.items()) if isinstance(value, dict) else value
