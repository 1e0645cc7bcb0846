"""Generated scenes of scattered digits: data with boxes that needs no download."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from comrope.experiments.common.randomness import derive
from comrope.experiments.data.coco import Target
from comrope.experiments.data.images import Digits

__all__ = ["Scenes"]

SIDE = 48  # of a scene, in pixels
SCENES = {"train": 512, "val": 96}
DIGITS = (2, 5)  # per scene: from 2 to 4
SCALES = (1.4, 2.6)  # of scikit-learn's 8 x 8 pixels
TRIES = 20  # to place a digit without overlap


class Scenes:
    """A ``BoxSource`` of scikit-learn's digits; training and validation share no digit."""

    def __init__(self, *, train: bool) -> None:
        self.part = "train" if train else "val"
        self.digits = Digits(train=train)
        self.classes = [str(digit) for digit in range(10)]
        self.category_ids = list(range(10))
        self.scenes = [self._scene(number) for number in range(SCENES[self.part])]
        self.truth = self._truth()

    def __len__(self) -> int:
        return len(self.scenes)

    def name(self, index: int) -> str:
        return f"scene {index} ({self.part})"

    def load(self, index: int) -> tuple[Image.Image, Target]:
        pixels, boxes, labels = self.scenes[index]
        target = Target(torch.tensor(boxes), torch.tensor(labels), index, [None] * len(labels))
        return Image.fromarray(pixels), target

    def _scene(self, number: int) -> tuple[np.ndarray, list[list[float]], list[int]]:
        """Return pixels, boxes and labels."""
        rng = np.random.default_rng(derive("scene", self.part, number))
        canvas = rng.uniform(0, 60, (SIDE, SIDE))
        boxes: list[list[float]] = []
        labels: list[int] = []
        for _ in range(rng.integers(*DIGITS)):
            image, digit = self.digits.load(int(rng.integers(len(self.digits))))
            side = round(8 * rng.uniform(*SCALES))
            ink = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
            for _ in range(TRIES):
                left, top = rng.integers(0, SIDE - side + 1, 2)
                if not any(_meet((left, top, left + side, top + side), box) for box in boxes):
                    place = canvas[top : top + side, left : left + side]
                    np.maximum(place, ink, out=place)
                    boxes.append([*map(float, (left, top, left + side, top + side))])
                    labels.append(digit + 1)
                    break
        return canvas.round().astype(np.uint8), boxes, labels

    def _truth(self) -> dict[str, Any]:
        """Return the annotations in the format of COCO's files."""
        annotations: list[dict[str, Any]] = []
        for index, (_, boxes, labels) in enumerate(self.scenes):
            for (left, top, right, bottom), label in zip(boxes, labels, strict=True):
                width, height = right - left, bottom - top
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": index,
                        "category_id": self.category_ids[label - 1],
                        "bbox": [left, top, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                    }
                )
        categories = zip(self.category_ids, self.classes, strict=True)
        return {
            "images": [{"id": n, "width": SIDE, "height": SIDE} for n in range(len(self))],
            "categories": [{"id": number, "name": name} for number, name in categories],
            "annotations": annotations,
        }


def _meet(first: tuple[int, ...], second: list[float]) -> bool:
    """Return whether two boxes have a pixel in common."""
    return (
        first[0] < second[2]
        and second[0] < first[2]
        and first[1] < second[3]
        and second[1] < first[3]
    )
