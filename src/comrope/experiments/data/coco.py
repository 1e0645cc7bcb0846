"""Images with boxes in COCO's format."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.coco_files import collection_paused, find_split, read_annotations
from comrope.experiments.data.outlines import pack
from comrope.experiments.data.pictures import decode

__all__ = ["Coco", "Target"]


class Target(NamedTuple):
    """The boxes in an image. Labels count from 1, as in torchvision: 0 is the background."""

    boxes: Tensor  # (n, 4), float32: left, top, right, bottom, in pixels
    labels: Tensor  # (n,)
    image_id: int
    outlines: list[Any]  # masks as COCO's compressed run lengths, one per box; empty without masks


class Coco:
    """Images in ``root/SPLIT``, boxes in ``root/annotations/instances_SPLIT.json``.

    Boxes are clipped at the edges of their image. Training does not use crowds, boxes outside of
    their image, and objects without a pixel. ``left_out`` has the ids of these annotations, by
    reason. Evaluation uses all annotations (``truth``), with COCO's own rules. An image may have no
    boxes.

    Loading processes get flat arrays, not the annotations, which are gigabytes of small objects for
    COCO.

    Args:
        root: The folder of the data set.
        split: The name of the split.
        mode: Pillow's name of the channels, "RGB" or "L".
        outlines: Whether outlines are needed.
        exif: Whether the orientation in EXIF data is applied.

    Raises:
        UserError: There is no such split, or its annotations are wrong.
    """

    def __init__(
        self,
        root: str | Path,
        split: str,
        mode: str = "RGB",
        *,
        outlines: bool = False,
        exif: bool = False,
    ) -> None:
        self.mode, self.exif = mode, exif
        self.folder, self.file = find_split(Path(root), split)
        with collection_paused():
            self.truth = read_annotations(self.file)
            self._flatten(outlines)

    def _flatten(self, outlines: bool) -> None:
        """Store what training uses as flat arrays."""
        images, annotations = self.truth["images"], self.truth["annotations"]
        categories = sorted(self.truth["categories"], key=lambda category: category["id"])
        self.classes = [category["name"] for category in categories]
        self.category_ids = [category["id"] for category in categories]  # with holes, as in COCO
        self.names = [image["file_name"] for image in images]
        self.ids = np.array([image["id"] for image in images], np.int64)
        self.sizes = np.array([(image["width"], image["height"]) for image in images])
        place = {image["id"]: place for place, image in enumerate(images)}
        places = np.array([place[a["image_id"]] for a in annotations], np.int64)
        if outlines:
            self._keep_boxes(places, *self._pack(places))
        else:
            self._keep_boxes(places, [], np.zeros(len(places), bool))

    def _pack(self, places: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        """Check and pack the outlines of all annotations, also in ``truth``.

        Args:
            places: The image of each annotation, (n,).

        Returns:
            Their run lengths, and whether they have no pixel, (n,).
        """
        packed, sizes = [], self.sizes.tolist()
        for annotation, place in zip(self.truth["annotations"], places.tolist(), strict=True):
            width, height = sizes[place]
            try:
                outline = pack(annotation.get("segmentation"), height, width)
            except ValueError as error:
                raise UserError(
                    f"{self.file}: annotation {annotation['id']}: segmentation: {error}; "
                    "detect.kind=box needs none"
                ) from None
            annotation["segmentation"] = {"size": [height, width], "counts": outline.runs}
            packed.append(outline)
        return [one.runs for one in packed], np.array([one.area == 0 for one in packed], bool)

    def _keep_boxes(self, places: np.ndarray, runs: list[bytes], blank: np.ndarray) -> None:
        """Store boxes, labels and outlines in the order of images, and the reasons of others.

        Args:
            places: The image of each annotation, (n,).
            runs: Run lengths of each annotation; none without outlines.
            blank: Whether they have no pixel, (n,).
        """
        annotations = self.truth["annotations"]
        label = {number: place for place, number in enumerate(self.category_ids, start=1)}
        labels = np.array([label[a["category_id"]] for a in annotations], np.int64)
        crowds = np.array([a["iscrowd"] for a in annotations], bool)
        corners = np.array([a["bbox"] for a in annotations], np.float64).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        boxes = np.clip(corners, 0, np.tile(self.sizes[places], 2)).astype(np.float32)
        outside = (boxes[:, 2:] <= boxes[:, :2]).any(1)
        reasons = {
            "crowds": crowds,
            "boxes outside of their images or without area": outside & ~crowds,
            "outlines without a pixel": blank & ~outside & ~crowds,
        }
        self.left_out = {
            reason: [annotations[n]["id"] for n in np.flatnonzero(which)]
            for reason, which in reasons.items()
            if which.any()
        }
        order = np.argsort(places, kind="stable")
        kept = order[~(crowds | outside | blank)[order]]
        self.boxes, self.labels = boxes[kept], labels[kept]
        self.ends = np.cumsum([0, *np.bincount(places[kept], minlength=len(self.ids))])
        own = [runs[n] for n in kept] if runs else []
        self.runs, self.run_ends = b"".join(own), np.cumsum([0, *map(len, own)])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "truth": None, "left_out": {}}

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
        image = decode(self.folder / self.names[index], self.mode, exif=self.exif)
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
