"""Object detection: a detector of torchvision around a ViT, evaluated by COCO's metrics."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from comrope.experiments.common.cuda_graph import replay_in_training
from comrope.experiments.common.distributed import autocast, sum_over_processes
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import seed_everything
from comrope.experiments.config import TIMM
from comrope.experiments.data.batches import IGNORED, Validation
from comrope.experiments.data.boxes import (
    BoxBatch,
    BoxDataset,
    BoxSource,
    collate_boxes,
    open_boxes,
)
from comrope.experiments.data.images import pil_mode
from comrope.experiments.tasks.base import NO_PROBE, Advance, Probe, Splits, Step, Task
from comrope.experiments.tasks.build import build_vit, pretrained_weights
from comrope.experiments.tasks.checks import check_axes, check_images, check_memory, refuse_clips
from comrope.experiments.tasks.coco_metrics import METRICS, metrics
from comrope.experiments.tasks.images import ImageView
from comrope.experiments.tasks.init_from import (
    ANGLE_KEYS,
    InitReport,
    check_finite,
    check_names,
    init_from_weights,
)
from comrope.experiments.tasks.outputs import OutputCheck
from comrope.models.detection import load_timm_weights
from comrope.models.detection.detector import detector

__all__ = ["DetectionTask"]

MAX_DETECTIONS = 100  # per image, as in COCO's metrics
FILE = ".safetensors"
# Whose outputs are checked: later ones that are not finite are left out as no detections.
HEADS = ("rpn.head", "roi_heads.box_predictor", "roi_heads.mask_predictor")
# Weights that a detector does not need: of a classifier, and of timm's ViTs (pos_embed where
# absolute positions are dropped).
OF_A_CLASSIFIER = ("cls_token", "head.weight", "head.bias")
UNUSED_OF_TIMM = re.compile(r"(cls_token|pos_embed|(head|head_dist|pre_logits)\b.*|dist_token)")


class DetectionTask(Task):
    """Boxes, and masks if ``detect.kind`` is "mask", of the objects in images."""

    name, headline, samples = "detection", "AP", "images"
    embedded = ("scenes",)

    # Configuration

    def check(self) -> None:
        config, detect = self.config, self.config.detect
        check_images(config)
        check_axes(config, 2)
        refuse_clips(config, "images with boxes")
        if config.model.name.startswith(TIMM):
            raise UserError(
                "model.name: expected vit_SIZE_patchP_RESOLUTION, a ViT of comrope; "
                f"train.start_from fills it with timm's weights; got {config.model.name!r}"
            )
        for name, wanted in (("perturbation", 0), ("strategy", "ddp")):
            if (value := getattr(config.train, name)) != wanted:
                raise UserError(f"train.{name}: expected {wanted} for a detector, got {value!r}")
        for name in ("mixup", "cutmix", "erase", "smoothing", "color_jitter", "auto_augment"):
            if value := getattr(config.augment, name):
                raise UserError(
                    f"augment.{name}: is not supported for images with boxes; expected none, got "
                    f"{value}"
                )
        if config.data.holdout:
            raise UserError(
                "data.holdout: images with boxes cannot be held out; expected 0, got "
                f"{config.data.holdout:g}"
            )
        if config.data.cache:
            raise UserError("data.cache: is not supported for images with boxes; expected false")
        if len(detect.anchors) != 5:
            raise UserError(
                f"detect.anchors: expected five sizes, one per level, got {detect.anchors}"
            )

    @property
    def training_view(self) -> ImageView:
        return ImageView(self.config.detect.image_size)

    def views(self, sizes: Sequence[int] | None = None) -> dict[str, ImageView]:
        """Return the view of training and those of ``evaluate.resolutions``."""
        own = self.config.detect.image_size
        wanted = (own, *self.config.evaluate.resolutions) if sizes is None else sizes
        return {str(size): ImageView(size) for size in wanted}

    def check_view(self, model: nn.Module, view: ImageView) -> None:
        vit = self.backbone(model)
        check_memory(self.config, vit, view, self.training_view, "detect.image_size")

    # Data

    def open(self, *, train: bool = True) -> Splits:
        data = self.config.data
        opened = open_boxes(
            data.name,
            data.root,
            (data.train_split, data.val_split),
            num_classes=data.num_classes,
            mode=pil_mode(data.in_chans),
            masks=self.has_masks,
            exif=data.exif_orientation,
            train=train,
        )
        return Splits(opened[0] if train else None, opened[-1])

    @property
    def has_masks(self) -> bool:
        return self.config.detect.kind == "mask"

    def dataset(self, source: BoxSource, view: ImageView | None) -> Dataset[Any]:
        config = self.config
        return BoxDataset(
            source,
            image_size=config.detect.image_size,
            jitter=config.detect.jitter,
            hflip=config.augment.hflip,
            fill=config.data.mean,  # zero after normalisation
            masks=self.has_masks,
            training=view is None,
            seed=config.train.seed,
            channels=config.data.in_chans,
            skip=config.data.unreadable == "skip",
        )

    def collate(self, items: list[Any]) -> BoxBatch:
        return collate_boxes(items)

    # Model

    def create_model(self) -> nn.Module:
        config, detect = self.config, self.config.detect
        vit = build_vit(config)
        seed_everything(config.train.seed, "heads")  # the same heads for every method
        try:
            model: Any = detector(
                detect.kind,
                vit=vit,
                num_classes=1 + config.data.num_classes,  # torchvision counts the background
                window=detect.window,
                scale=detect.scale,
                image_size=detect.image_size,
                anchor_sizes=detect.anchors,
                finest_stride=detect.finest_stride,
                out_channels=detect.out_channels,
                head_channels=detect.head_channels,
                image_mean=config.data.mean,
                image_std=config.data.std,
                rpn_pre_nms_top_n_train=2 * detect.proposals,
                rpn_post_nms_top_n_train=2 * detect.proposals,
                rpn_pre_nms_top_n_test=detect.proposals,
                rpn_post_nms_top_n_test=detect.proposals,
                box_batch_size_per_image=detect.samples,
                box_detections_per_img=MAX_DETECTIONS,
            )
        except ValueError as error:
            raise UserError(f"model: {error}") from None
        model.transform.size_divisible = _padded(model.backbone.coarsest_stride, detect.image_size)
        return model

    def backbone(self, model: Any) -> Any:
        """Return the ViT inside a detector."""
        return model.backbone.plain.vit

    def position_parameters(self, model: nn.Module) -> int:
        return int(self.backbone(model).position_parameters())

    def initialize(self, model: nn.Module) -> InitReport:
        """Load ``train.start_from`` into the ViT.

        It is a classification run, timm's weights by name, or a ``.safetensors`` file with timm's
        names.
        """
        start, vit = str(self.config.train.start_from), self.backbone(model)
        if not start.startswith(TIMM) and not start.endswith(FILE):
            return init_from_weights(vit, self.config, unused=OF_A_CLASSIFIER)
        if start.startswith(TIMM):
            tensors, _ = pretrained_weights(self.config, start)
            tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        else:
            try:
                tensors = load_file(Path(start))
            except (OSError, SafetensorError) as error:
                raise UserError(f"train.start_from: {start} cannot be read ({error})") from None
        check_finite(start, tensors)
        try:
            loaded = load_timm_weights(vit, tensors)
        except ValueError as error:
            raise UserError(f"train.start_from: {start} does not fit: {error}") from None
        wrong = [f"{name} is missing" for name in loaded.new if not ANGLE_KEYS.search(name)]
        unexpected = [name for name in loaded.left_out if not UNUSED_OF_TIMM.match(name)]
        wrong += [f"{name} is unexpected" for name in unexpected]
        check_names(f"train.start_from: {start}", wrong)
        return InitReport(start, [*loaded.new], [*loaded.left_out])

    def prepare(self, model: Any, accelerator: Accelerator) -> None:
        """Record the backbone as a CUDA graph if ``detect.graph``.

        Only on one GPU and without gradient accumulation.
        """
        config, device = self.config, accelerator.device
        alone = accelerator.num_processes == 1 and config.train.accumulate == 1
        if not config.detect.graph or device.type != "cuda" or not alone:
            return
        size = 2 * (config.detect.image_size,)
        images = torch.zeros(config.train.batch_size, config.data.in_chans, *size, device=device)
        with autocast(config.train.precision, device):
            replay_in_training(model.backbone.plain, images)

    # Training and evaluation

    def loss(self, model: nn.Module, batch: BoxBatch, step: Step) -> Tensor:
        """Return the sum of torchvision's losses: of proposals, boxes, classes and masks."""
        losses = model(*batch.on(step.device))
        return torch.stack([loss.float() for loss in losses.values()]).sum()

    def evaluate(
        self,
        model: nn.Module,
        validation: Validation,
        view: ImageView,
        accelerator: Accelerator,
        *,
        probe: Probe = NO_PROBE,
        advance: Advance = lambda samples: None,
    ) -> dict[str, Any]:
        """Return COCO's six metrics of boxes, in percent, at an image size; of masks too.

        Unreadable images count as images without detections.
        """
        self.check_probe(model, probe)
        source: BoxSource = validation.source
        outputs = OutputCheck(accelerator.device)
        with outputs.watching(m for name, m in model.named_modules() if name in HEADS):
            found, unreadable = self.find(
                model, validation.batches(view), source, view, accelerator, advance
            )
        everything = gather_object(found) if accelerator.num_processes > 1 else found
        skipped, wrong = sum_over_processes(accelerator, float(len(unreadable)), outputs.wrong)
        outputs.require_none(wrong, view)
        result: dict[str, Any] = {**metrics(source.truth, everything)}
        if self.has_masks:
            result["masks"] = metrics(source.truth, everything, "segm")
        return {**result, "images": len(source), "unreadable": skipped}

    @torch.compiler.set_stance("force_eager")  # every size would be compiled again
    @torch.inference_mode()
    def find(
        self,
        model: nn.Module,
        batches: Iterable[BoxBatch],
        source: BoxSource,
        view: ImageView,
        accelerator: Accelerator,
        advance: Advance = lambda samples: None,
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Run a detector on this process's images.

        Args:
            model: The detector.
            batches: The images.
            source: The source of the images.
            view: The size that images are resized to.
            accelerator: Of this process.
            advance: Called with the number of images after every batch.

        Returns:
            Detections in COCO's format, and the names of unreadable images.
        """
        found: list[dict[str, Any]] = []
        unreadable: list[str] = []
        was_training = model.training
        model.eval()
        with _resized_to(model, view.resolution):
            for batch in batches:
                if batch.fatal:
                    raise UserError(batch.fatal)
                unreadable += batch.unreadable
                with autocast(self.config.train.precision, accelerator.device):
                    outputs = model(batch.on(accelerator.device)[0])
                for number, output in zip(batch.image_ids, outputs, strict=True):
                    if number != IGNORED:
                        found += _as_coco(number, output, source.category_ids)
                advance(len(outputs) * accelerator.num_processes)
        model.train(was_training)
        return found, unreadable

    # Results

    def log_values(self, found: dict[str, Any]) -> dict[str, Any]:
        return {name: found[name] for name in (*METRICS, "masks") if name in found}

    def summarize(self, source: Any, by_view: dict[str, Any]) -> dict[str, Any]:
        """Return AP, all metrics in every view with the key "figures", and the class names."""
        figures = {name: self.log_values(found) for name, found in by_view.items()}
        return {**super().summarize(source, by_view), "figures": figures, "classes": source.classes}

    def merge(self, result: dict[str, Any], by_view: dict[str, Any]) -> None:
        super().merge(result, by_view)
        result["figures"].update({name: self.log_values(found) for name, found in by_view.items()})

    def format_view(self, name: str) -> str:
        return f"{name} px"

    def describe(self, view: str, entry: dict[str, Any]) -> str:
        """Return all metrics of an entry; "–" for metrics without annotated objects."""
        values = [(name, entry[name]) for name in METRICS if name in entry]
        text = "  ".join(f"{n} {'–' if v is None else f'{v:.2f}':>6}" for n, v in values)
        return f"{self.format_view(view):>8}  {text} {self.unit}"


def _padded(stride: int, size: int) -> int:
    """Return the smallest multiple of ``stride`` that is at least ``size``."""
    return -(-size // stride) * stride


@contextlib.contextmanager
def _resized_to(model: Any, size: int) -> Iterator[None]:
    """Resize images to a square of another size within the block."""
    transform = model.transform
    before = transform.min_size, transform.max_size, transform.size_divisible
    transform.min_size, transform.max_size = (size,), size
    transform.size_divisible = _padded(model.backbone.coarsest_stride, size)
    try:
        yield
    finally:
        transform.min_size, transform.max_size, transform.size_divisible = before


def _as_coco(
    number: int, output: dict[str, Tensor], category_ids: list[int]
) -> list[dict[str, Any]]:
    """Return the detections in an image in COCO's format."""
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
