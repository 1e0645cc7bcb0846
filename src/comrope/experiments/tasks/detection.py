"""Detection as something to train: the detector, its loss, and COCO's figures of what it finds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from comrope.experiments.common.distributed import autocast, total
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import TIMM, Config
from comrope.experiments.data.batches import IGNORED, Validation
from comrope.experiments.data.boxes import BoxBatch, Boxed
from comrope.experiments.data.coco import metrics
from comrope.experiments.tasks.build import pretrained_weights
from comrope.experiments.tasks.init_from import ANGLES, OF_A_CLASSIFIER, begin_with, refuse_misfits
from comrope.experiments.tasks.views import View
from comrope.models import ViT
from comrope.models.detection import Loaded, load_timm_weights
from comrope.models.detection.detector import detector

__all__ = [
    "average_precision",
    "begin_detector",
    "build_detector",
    "detection_loss",
    "find",
    "score",
]

MOST_FOUND = 100  # an image, as COCO's figures count
FILE = ".safetensors"
# Of timm's weights, what a detector has no use for; pos_embed where absolute positions are dropped.
SPARE = re.compile(r"(cls_token|pos_embed|(head|head_dist|pre_logits)\b.*|dist_token)")


def build_detector(config: Config, vit: ViT) -> nn.Module:
    """A detector of torchvision around a ViT, as the section ``detect`` says."""
    detect, data = config.detect, config.data
    try:
        model: Any = detector(
            detect.kind,
            vit=vit,
            num_classes=1 + data.num_classes,  # torchvision counts the background
            window=detect.window,
            scale=detect.scale,
            image_size=detect.image_size,
            anchor_sizes=detect.anchors,
            finest_stride=detect.finest_stride,
            out_channels=detect.out_channels,
            head_channels=detect.head_channels,
            image_mean=data.mean,
            image_std=data.std,
            rpn_pre_nms_top_n_train=2 * detect.proposals,
            rpn_post_nms_top_n_train=2 * detect.proposals,
            rpn_pre_nms_top_n_test=detect.proposals,
            rpn_post_nms_top_n_test=detect.proposals,
            box_batch_size_per_image=detect.samples,
            box_detections_per_img=MOST_FOUND,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    model.transform.size_divisible = _square(model.backbone.coarsest_stride, detect.image_size)
    return model


def _square(stride: int, size: int) -> int:
    """The side of the padded square: a multiple of the coarsest stride that ``size`` fits in."""
    return -(-size // stride) * stride


def begin_detector(vit: ViT, config: Config) -> dict[str, Any]:
    """Fill the ViT of a detector with ``train.start_from``: a classification run's, timm's by name,
    or those of a ``.safetensors`` file that has timm's names."""
    start = str(config.train.start_from)
    if not start.startswith(TIMM) and not start.endswith(FILE):
        return begin_with(vit, config, unused=OF_A_CLASSIFIER)
    if start.startswith(TIMM):
        tensors, _ = pretrained_weights(config, start)
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    else:
        try:
            tensors = load_file(Path(start))
        except (OSError, SafetensorError) as error:
            raise UserError(f"train.start_from: {start} cannot be read ({error})") from None
    try:
        loaded = load_timm_weights(vit, tensors)
    except ValueError as error:
        raise UserError(f"train.start_from: {start} does not fit: {error}") from None
    _require_whole(start, loaded)
    return {"start": start, "new": [*loaded.new], "left_out": [*loaded.left_out]}


def _require_whole(start: str, loaded: Loaded) -> None:
    """Raise unless weights filled the ViT, and had no more than a detector can do without."""
    wrong = [f"{name} is missing" for name in loaded.new if not ANGLES.search(name)]
    wrong += [f"{name} has no place" for name in loaded.left_out if not SPARE.match(name)]
    refuse_misfits(start, wrong)


def detection_loss(model: nn.Module, batch: BoxBatch, device: torch.device) -> Tensor:
    """The sum of torchvision's losses: of proposals, boxes, classes and masks."""
    losses = model(*batch.on(device))
    return torch.stack([loss.float() for loss in losses.values()]).sum()


def average_precision(
    model: nn.Module,
    config: Config,
    validation: Validation,
    view: View,
    accelerator: Accelerator,
    *,
    advance: Callable[[int], Any] = lambda images: None,
) -> dict[str, Any]:
    """COCO's six figures of a validation set, seen at any size."""
    source = cast(Boxed, validation.source)
    batches = cast(Iterator[BoxBatch], validation.batches(view))
    found, unreadable = find(model, config, batches, source, view, accelerator, advance)
    masks = config.detect.kind == "mask"
    return score(found, unreadable, source, accelerator, masks=masks)


@torch.compiler.set_stance("force_eager")  # every size would be compiled anew
@torch.inference_mode()
def find(
    model: nn.Module,
    config: Config,
    batches: Iterator[BoxBatch],
    source: Boxed,
    view: View,
    accelerator: Accelerator,
    advance: Callable[[int], Any] = lambda images: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Everything that is found in the images of this process, as COCO writes it; and the images
    that could not be read."""
    found: list[dict[str, Any]] = []
    unreadable: list[str] = []
    was_training = model.training
    model.eval()
    with _seen_at(model, view.resolution):
        for batch in batches:
            if batch.fatal:
                raise UserError(batch.fatal)
            unreadable += batch.unreadable
            with autocast(config.train.precision, accelerator.device):
                outputs = model(batch.on(accelerator.device)[0])
            for number, output in zip(batch.image_ids, outputs, strict=True):
                if number != IGNORED:
                    found += _as_coco(number, output, source.category_ids)
            advance(len(outputs) * accelerator.num_processes)
    model.train(was_training)
    return found, unreadable


@contextlib.contextmanager
def _seen_at(model: Any, size: int) -> Iterator[None]:
    """Images are fitted into a square of another size for a while."""
    transform = model.transform
    before = transform.min_size, transform.max_size, transform.size_divisible
    transform.min_size, transform.max_size = (size,), size
    transform.size_divisible = _square(model.backbone.coarsest_stride, size)
    try:
        yield
    finally:
        transform.min_size, transform.max_size, transform.size_divisible = before


def _as_coco(
    number: int, output: dict[str, Tensor], category_ids: list[int]
) -> list[dict[str, Any]]:
    boxes = output["boxes"].float().cpu()
    boxes[:, 2:] -= boxes[:, :2]
    kept = zip(boxes.tolist(), output["labels"].tolist(), output["scores"].tolist(), strict=True)
    entries: list[dict[str, Any]] = [
        {"image_id": number, "category_id": category_ids[label - 1], "bbox": box, "score": score}
        for box, label, score in kept
    ]
    if "masks" in output:
        from pycocotools import mask

        inside = (output["masks"][:, 0] > 0.5).cpu().numpy().astype(np.uint8)  # (n, H, W)
        coded = mask.encode(np.asfortranarray(inside.transpose(1, 2, 0)))
        for entry, runs in zip(entries, coded, strict=True):
            entry["segmentation"] = {**runs, "counts": runs["counts"].decode()}
    return entries


def score(
    found: list[dict[str, Any]],
    unreadable: list[str],
    source: Boxed,
    accelerator: Accelerator,
    *,
    masks: bool = False,
) -> dict[str, Any]:
    """COCO's six figures over what all processes found, the same in each; of ``masks`` too. Images
    that could not be read count: nothing was found in them."""
    everything = gather_object(found) if accelerator.num_processes > 1 else found
    (skipped,) = total(accelerator, float(len(unreadable)))
    result: dict[str, Any] = {**metrics(source.truth, everything)}
    if masks:
        result["masks"] = metrics(source.truth, everything, "segm")
    return {**result, "images": len(source), "unreadable": skipped}
