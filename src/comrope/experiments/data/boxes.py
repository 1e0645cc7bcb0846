"""Images with boxes. One draw augments both, a function of seed, epoch and place.

Training images are squares of ``image_size``: the image at a random scale, cropped or padded
(large-scale jitter). Evaluation images are unchanged: the detector resizes them.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import seeded
from comrope.experiments.data.batches import IGNORED
from comrope.experiments.data.coco import Coco, Target
from comrope.experiments.data.datasets import ImageDataset, Item
from comrope.experiments.data.images import check_classes, require_root
from comrope.experiments.data.scenes import Scenes

__all__ = ["BoxBatch", "BoxDataset", "BoxSource", "collate_boxes", "open_boxes"]

MIN_SIDE = 1.0  # of a training box, in pixels after augmentation


class BoxSource(Protocol):
    """Images with boxes, by number."""

    truth: dict[str, Any]  # in the format of COCO's annotation files
    classes: list[str]
    category_ids: list[int]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the name of image ``index`` for messages."""

    def load(self, index: int) -> tuple[Image.Image, Target]:
        """Return the image and its boxes; raise any error if it cannot be read."""


def open_boxes(
    name: str,
    root: str | None,
    splits: tuple[str, str],
    *,
    num_classes: int,
    mode: str = "RGB",
    masks: bool = False,
    exif: bool = False,
    train: bool = True,
) -> list[BoxSource]:
    """Open the training and the validation split, or only the latter, and check them.

    Args:
        name: "coco" or "scenes".
        root: The folder of the data set.
        splits: The names of the two splits.
        num_classes: Number of classes that each split must have.
        mode: Pillow's name of the channels, "RGB" or "L".
        masks: Whether masks are needed.
        exif: Whether the orientation in EXIF data is applied.
        train: Whether both splits are opened.
    """
    for package in ("torchvision", "pycocotools"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"data.name: {name} needs {package}, which is not installed: "
                "pip install 'comrope[detection]'"
            )
    opened: list[BoxSource]
    if name == "scenes":
        if masks:
            raise UserError("detect.kind: scenes have no masks; expected box")
        opened = [Scenes(train=part) for part in ((True, False) if train else (False,))]
    elif name == "coco":
        folder = require_root(root)
        wanted = splits[0 if train else 1 :]
        opened = [Coco(folder, split, mode, outlines=masks, exif=exif) for split in wanted]
    else:
        raise UserError(f"data.name: expected coco or scenes, got {name!r}")
    for source in opened:
        check_classes(len(source.classes), num_classes, root or name)
        if source.category_ids != opened[0].category_ids:
            raise UserError(
                f"data.root: {root}: splits {splits[0]!r} and {splits[1]!r} differ in categories"
            )
        if not any(not a["iscrowd"] for a in source.truth["annotations"]):
            raise UserError(f"data.root: {root}: expected boxes in every split, one has none")
    if train:
        if isinstance(opened[0], Coco) and not len(opened[0].labels):
            raise UserError(
                f"data.root: {root}: expected boxes inside of images, split {splits[0]!r} has none"
            )
        opened[0].truth = {}  # no longer needed, and gigabytes for COCO
    return opened


class BoxBatch(NamedTuple):
    """Images and boxes, in few tensors: a tensor sent between processes needs an open file."""

    images: Tensor | list[Tensor]  # uint8, (B, C, H, W), or of several sizes
    parts: dict[str, Tensor]  # boxes (n, 4), labels (n,) and masks (n, H, W), image after image
    counts: list[int]  # boxes of each image
    image_ids: list[int]  # IGNORED for padding
    unreadable: list[str]
    fatal: str | None

    def on(self, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Return images in [0, 1] and their boxes, in the format of torchvision's detectors."""
        images = [image.to(device, non_blocking=True) for image in self.images]
        apart = {
            name: part.to(device, non_blocking=True).split(self.counts)
            for name, part in self.parts.items()
        }
        targets = [{name: part[i] for name, part in apart.items()} for i in range(len(images))]
        return [image.float() / 255 for image in images], targets


class BoxDataset(ImageDataset):
    """A source with augmentation; ``Item.image`` is an image, its boxes and its id.

    Args:
        source: A ``BoxSource``.
        image_size: Side of the square that training images are cut to, in pixels.
        jitter: Smallest and largest scale of a training image, relative to the one that fits.
        hflip: Probability of a horizontal flip.
        fill: Padding of a training image, one value in [0, 1] per channel.
        masks: Whether masks are returned.
        training: Whether images are augmented.
        options: Options of ``ImageDataset``.
    """

    def __init__(
        self,
        source: BoxSource,
        *,
        image_size: int,
        jitter: tuple[float, float],
        hflip: float,
        fill: Sequence[float],
        masks: bool = False,
        training: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(source, _unchanged, num_classes=1, training=training, **options)
        self.image_size, self.jitter, self.hflip = image_size, jitter, hflip
        self.fill = [round(255 * value) for value in fill]
        self.masks, self.training = masks, training
        nothing = Target(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), IGNORED, [])
        self.blank = (self.blank, nothing)

    def load(self, index: int, key: Any) -> tuple[Any, int]:
        return self.source.load(index), 0

    def augment(self, image: tuple[Image.Image, Target], key: Any) -> Any:
        """Return the image as bytes (C, H, W), its boxes, labels and masks, and its id."""
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
        if self.training and self.masks:
            parts["masks"] = tv_tensors.Mask(_masks(target.outlines, canvas))
        labels = target.labels
        if self.training:
            parts = self._jittered(parts)
            parts["boxes"], kept = F.sanitize_bounding_boxes(parts["boxes"], min_size=MIN_SIDE)
            labels = labels[kept]
            if "masks" in parts:
                parts["masks"] = parts["masks"][kept]
        plain = {name: part.as_subclass(Tensor) for name, part in parts.items()}
        return plain.pop("image"), {**plain, "labels": labels}, target.image_id

    def _jittered(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the parts with a random flip and scale, cropped or padded to the square."""
        from torchvision.transforms.v2 import functional as F

        side = self.image_size
        height, width = parts["image"].shape[-2:]
        scale = side / max(height, width) * random.uniform(*self.jitter)
        # Crop to the part that will be in the square first, so that less is resized.
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


def _unchanged(image: Any) -> Any:
    return image


def _masks(outlines: list[Any], canvas: tuple[int, int]) -> Tensor:
    """Return masks (n, H, W), uint8, from COCO's run lengths."""
    from pycocotools import mask

    found = np.zeros((len(outlines), *canvas), np.uint8)
    for number, outline in enumerate(outlines):
        found[number] = mask.decode(outline)
    return torch.from_numpy(found)


def collate_boxes(items: list[Item]) -> BoxBatch:
    """Return a batch of images and boxes."""
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
