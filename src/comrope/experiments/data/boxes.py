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

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import seeded
from comrope.experiments.config import Config
from comrope.experiments.data.batches import IGNORED, Images, Item
from comrope.experiments.data.coco import Coco, Target
from comrope.experiments.data.images import check_classes, mode_of, root_of

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
    data, masks = config.data, config.detect.kind == "mask"
    for package in ("torchvision", "pycocotools"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"data.name: {data.name} needs {package}, which is not installed: "
                "pip install 'comrope[detection]'"
            )
    if data.name == "scenes":
        from comrope.experiments.data.scenes import Scenes

        if masks:
            raise UserError(
                "detect.kind: scenes have no outlines to learn masks from; expected box"
            )

        opened: list[Boxed] = [
            Scenes(train=part) for part in ((True, False) if train else (False,))
        ]
    else:
        splits = [data.train_split, data.val_split][0 if train else 1 :]
        opened = [Coco(root_of(data), split, mode_of(data), outlines=masks) for split in splits]
    for source in opened:
        check_classes(data, len(source.classes), data.root or data.name)
        if source.category_ids != opened[0].category_ids:
            raise UserError(
                f"data.root: {data.root}: splits {data.train_split!r} and {data.val_split!r} have "
                "other categories"
            )
        if not any(not a["iscrowd"] for a in source.truth["annotations"]):
            raise UserError(f"data.root: {data.root}: a split without any box; there is nothing "
                            "to find")  # fmt: skip
    if train:
        if isinstance(opened[0], Coco) and not len(opened[0].labels):
            raise UserError(
                f"data.root: {data.root}: no box of split {data.train_split!r} is in its image"
            )
        opened[0].truth = {}  # nobody asks for it again, and COCO's is gigabytes
    return opened[0] if train else None, opened[-1]


class BoxBatch(NamedTuple):
    """As ``Batch``, in few tensors: between processes each of them is an open file."""

    images: Tensor | list[Tensor]  # uint8, (B, C, H, W), or of several sizes
    parts: dict[str, Tensor]  # boxes (n, 4), labels (n,) and masks (n, H, W), image after image
    counts: list[int]  # boxes of each image
    image_ids: list[int]  # IGNORED of what only fills a batch
    unreadable: list[str]
    fatal: str | None

    def on(self, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Images in [0, 1], and what is in each, as torchvision's detectors want them."""
        images = [image.to(device, non_blocking=True) for image in self.images]
        apart = {
            name: part.to(device, non_blocking=True).split(self.counts)
            for name, part in self.parts.items()
        }
        targets = [{name: part[i] for name, part in apart.items()} for i in range(len(images))]
        return [image.float() / 255 for image in images], targets


class BoxedImages(Images):
    """A source behind its augmentation; ``Item.image`` is an image, what is in it, and its id."""

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

    def _prepared(
        self, image: Image.Image, target: Target
    ) -> tuple[Tensor, dict[str, Tensor], int]:
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
        return plain.pop("image"), {**plain, "labels": labels}, target.image_id

    def _jittered(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Flipped or not, at a scale between two, cut or padded to the square."""
        from torchvision.transforms.v2 import functional as F

        side = self.detect.image_size
        height, width = parts["image"].shape[-2:]
        scale = side / max(height, width) * random.uniform(*self.detect.jitter)
        # What will be in the square is cut out first: the rest need not be resized.
        kept = [min(size, max(1, round(side / scale))) for size in (height, width)]
        top, left = (
            random.randint(0, size - k) for size, k in zip((height, width), kept, strict=True)
        )
        rows, columns = (min(side, max(1, round(scale * size))) for size in kept)
        flip = random.random() < self.hflip
        out = {}
        for name, part in parts.items():
            part = F.horizontal_flip(part) if flip else part
            part = F.resized_crop(part, top, left, *kept, [rows, columns], antialias=True)
            fill: Any = self.fill if name == "image" else 0
            out[name] = F.pad(part, [0, 0, side - columns, side - rows], fill=fill)
        return out


def _masks(outlines: list[Any], canvas: tuple[int, int]) -> Tensor:
    """(n, H, W), uint8, from COCO's run lengths."""
    from pycocotools import mask

    found = np.zeros((len(outlines), *canvas), np.uint8)
    for number, outline in enumerate(outlines):
        found[number] = mask.decode(outline)
    return torch.from_numpy(found)


def collate_boxes(items: list[Item]) -> BoxBatch:
    found, _, unreadable, fatal = zip(*items, strict=True)
    images, targets, numbers = zip(*found, strict=True)
    alike = len({image.shape for image in images}) == 1
    return BoxBatch(
        torch.stack(images) if alike else [*images],
        {name: torch.cat([target[name] for target in targets]) for name in targets[0]},
        [len(target["labels"]) for target in targets],
        [*numbers],
        [name for some in unreadable for name in some],
        next(filter(None, fatal), None),
    )
