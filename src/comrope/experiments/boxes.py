"""Batches of images with boxes: both augmented by one draw, a function of seed, epoch and place.

Training images are squares of ``detect.image_size``, cut from or padded around the image at a scale
of its own (large-scale jitter). Images to evaluate are as they are: the detector resizes them.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from comrope.experiments.coco import Coco, Target
from comrope.experiments.config import Config
from comrope.experiments.data import IGNORED, Images, Item
from comrope.experiments.errors import UserError
from comrope.experiments.randomness import seeded
from comrope.experiments.sources import check_classes, mode_of, root_of

__all__ = ["BoxBatch", "Boxed", "BoxedImages", "collate_boxes", "open_boxed"]

SMALLEST = 1.0  # side of a box that is worth learning, in pixels after augmentation


class Boxed(Protocol):
    """Images with boxes, by number."""

    truth: dict[str, Any]  # as COCO's annotation files have it
    classes: list[str]
    category_ids: list[int]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call image ``index`` when something is wrong with it."""

    def load(self, index: int) -> tuple[Image.Image, Target]:
        """The image and what is in it; an error of any kind if it cannot be read."""


def open_boxed(config: Config, *, train: bool = True) -> tuple[Boxed | None, Boxed]:
    """The training source (None unless asked for) and the validation source, checked."""
    data = config.data
    for package in ("torchvision", "pycocotools"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"data.name: {data.name} needs {package}, which is not installed: "
                "pip install 'comrope[detection]'"
            )
    if data.name == "scenes":
        from comrope.experiments.scenes import Scenes

        opened: list[Boxed] = [
            Scenes(train=part) for part in ((True, False) if train else (False,))
        ]
    else:
        splits = [data.train_split, data.val_split][0 if train else 1 :]
        opened = [Coco(root_of(data), split, mode_of(data)) for split in splits]
    for source in opened:
        check_classes(data, len(source.classes), data.root or data.name)
        if source.category_ids != opened[0].category_ids:
            raise UserError(
                f"data.root: {data.root}: splits {data.train_split!r} and {data.val_split!r} have "
                "other categories"
            )
        if not source.truth["annotations"]:
            raise UserError(f"data.root: {data.root}: a split without any box; there is nothing "
                            "to find")  # fmt: skip
    if config.detect.kind == "mask" and train:
        _require_outlines(opened[0])
    return opened[0] if train else None, opened[-1]


def _require_outlines(source: Boxed) -> None:
    for annotation in source.truth["annotations"]:
        if not annotation.get("segmentation"):
            raise UserError(
                f"detect.kind: annotation {annotation['id']} has no segmentation, so there are no "
                "masks to learn; expected box"
            )


class BoxBatch(NamedTuple):
    """As ``Batch``; an image without a place in the data set, which only fills, has ``image_id``
    IGNORED."""

    images: list[Tensor]  # (C, H, W) each, uint8
    targets: list[dict[str, Tensor]]  # boxes, labels, image_id; masks
    unreadable: list[str]
    fatal: str | None


class BoxedImages(Images):
    """A source behind its augmentation; ``Item.image`` is a pair of image and target."""

    def __init__(self, source: Any, config: Config, *, train: bool) -> None:
        super().__init__(source, None, config, take_next=train)
        self.train, self.detect, self.hflip = train, config.detect, config.augment.hflip
        self.fill = [round(255 * mean) for mean in config.data.mean]  # zero after normalisation
        nothing = Target(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), IGNORED, [])
        self.blank = (self.blank, nothing)  # type: ignore[assignment]

    def _load(self, index: int, key: Any) -> tuple[Any, int]:
        return self.source.load(index), 0

    def _augmented(self, image: Any, key: Any) -> Any:
        with seeded(self.seed, "image", key.epoch, key.place):
            return self._prepared(*image)

    def _prepared(self, image: Image.Image, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional as F

        canvas = (image.height, image.width)
        parts: dict[str, Any] = {
            "image": tv_tensors.Image(F.pil_to_tensor(image)),
            "boxes": tv_tensors.BoundingBoxes(target.boxes, format="XYXY", canvas_size=canvas),
        }
        if self.train and self.detect.kind == "mask":
            parts["masks"] = tv_tensors.Mask(_masks(target.outlines, canvas))
        labels = target.labels
        if self.train:
            parts = self._jittered(parts)
            parts["boxes"], kept = F.sanitize_bounding_boxes(parts["boxes"], min_size=SMALLEST)
            labels = labels[kept]
            if "masks" in parts:
                parts["masks"] = parts["masks"][kept]
        plain = {name: part.as_subclass(Tensor) for name, part in parts.items()}
        image_id = torch.tensor(target.image_id)
        return plain.pop("image"), {**plain, "labels": labels, "image_id": image_id}

    def _jittered(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Flipped or not, at a scale between two, cut or padded to the square."""
        from torchvision.transforms.v2 import functional as F

        side = self.detect.image_size
        height, width = parts["image"].shape[-2:]
        scale = side / max(height, width) * random.uniform(*self.detect.jitter)
        rows, columns = (max(1, round(scale * size)) for size in (height, width))
        top, left = (random.randint(0, max(0, size - side)) for size in (rows, columns))
        cut = min(rows, side), min(columns, side)
        flip = random.random() < self.hflip
        out = {}
        for name, part in parts.items():
            part = F.horizontal_flip(part) if flip else part
            part = F.crop(F.resize(part, [rows, columns], antialias=True), top, left, *cut)
            fill: Any = self.fill if name == "image" else 0
            out[name] = F.pad(part, [0, 0, side - cut[1], side - cut[0]], fill=fill)
        return out


def _masks(outlines: list[Any], canvas: tuple[int, int]) -> Tensor:
    """(n, H, W), uint8, from COCO's polygons and run lengths."""
    from pycocotools import mask as runs

    found = np.zeros((len(outlines), *canvas), np.uint8)
    for number, outline in enumerate(outlines):
        if isinstance(outline, dict):
            packed = isinstance(outline["counts"], (str, bytes))
            coded = outline if packed else runs.frPyObjects(outline, *canvas)
        else:
            coded = runs.merge(runs.frPyObjects(outline, *canvas))
        found[number] = runs.decode(coded)
    return torch.from_numpy(found)


def collate_boxes(items: list[Item]) -> BoxBatch:
    pairs, _, unreadable, fatal = zip(*items, strict=True)
    images, targets = zip(*pairs, strict=True)
    names = [name for some in unreadable for name in some]
    return BoxBatch([*images], [*targets], names, next(filter(None, fatal), None))
