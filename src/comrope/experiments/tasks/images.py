"""Classification of images."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from comrope import positions as coordinates
from comrope.experiments.common.distributed import autocast, reshard, sum_over_processes, unwrap
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import shown
from comrope.experiments.common.randomness import generator
from comrope.experiments.config import TIMM, Config
from comrope.experiments.data import files
from comrope.experiments.data.batches import IGNORED, Batch, Key, Validation
from comrope.experiments.data.datasets import ImageDataset, collate_images
from comrope.experiments.data.holdout import held_out
from comrope.experiments.data.images import CachedImages, open_images, pil_mode
from comrope.experiments.data.transforms import evaluation_transform, training_transform
from comrope.experiments.tasks.base import NO_PROBE, Advance, Probe, Splits, Step, Task
from comrope.experiments.tasks.build import (
    TimmModel,
    build_timm_model,
    build_vit,
    training_resolution,
)
from comrope.experiments.tasks.checks import (
    check_axes,
    check_images,
    check_memory,
    check_policy,
    refuse_clips,
)
from comrope.experiments.tasks.init_from import InitReport, init_from_weights
from comrope.experiments.tasks.mixing import MixAndSmooth
from comrope.experiments.tasks.outputs import OutputCheck

__all__ = ["ImageTask", "ImageView", "normalize"]

MAX_COUNTED = 32  # classes for which a confusion matrix is computed
MAX_TRIED = 1024  # pixels of a tried transform: larger ones do the same, and take longer
DRAWS = 16  # of a tried policy, each of some of its operations
PACKAGE = "comrope.experiments."
PADDING = -1  # the place of a sample without a source


class ImageView(NamedTuple):
    """A resolution to evaluate at."""

    resolution: int

    @property
    def size(self) -> int:
        """Pixels of an image."""
        return self.resolution**2


class ImageTask(Task):
    """Classes of images, by a ViT of comrope or of timm."""

    name, headline, samples = "images", "top1", "images"
    embedded = ("digits",)
    num_axes = 2

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mix = MixAndSmooth(config.augment, config.data.num_classes)

    # Configuration

    def check(self) -> None:
        check_images(self.config)
        config = self.config
        if not config.evaluate.resolutions:
            raise UserError("evaluate.resolutions: expected at least one, got none")
        check_policy(config.augment.auto_augment)
        check_axes(config, self.num_axes)
        self.check_frames()

    def check_frames(self) -> None:
        """Raise if a field for clips is set."""
        refuse_clips(self.config, "images")

    def check_evaluation(self, trained: Config) -> None:
        super().check_evaluation(trained)
        if self.config.data.holdout not in (0.0, trained.data.holdout):
            raise UserError(
                f"data.holdout: expected {trained.data.holdout:g}, as in training, or 0, the "
                f"validation set, got {self.config.data.holdout:g}, which contains training images "
                "of the run"
            )

    @property
    def training_view(self) -> Any:
        return ImageView(self.resolution[0])

    @property
    def resolution(self) -> tuple[int, int]:
        """The training resolution, (rows, columns) in pixels."""
        return training_resolution(self.config.model.name)

    def views(self, sizes: Sequence[int] | None = None) -> dict[str, Any]:
        """Return a view for every resolution, by default those of ``evaluate.resolutions``."""
        wanted = self.config.evaluate.resolutions if sizes is None else sizes
        return {str(size): self.training_view._replace(resolution=size) for size in wanted}

    def check_view(self, model: nn.Module, view: Any) -> None:
        for patch in self.backbone(model).patches.patch_size[-2:]:
            if view.resolution < patch or view.resolution % patch:
                raise UserError(
                    f"evaluate.resolutions: expected multiples of the patch size {patch}, "
                    f"got {view.resolution}"
                )
        check_memory(self.config, self.backbone(model), view, self.training_view, "model.name")

    def try_transforms(self, views: Iterable[Any], *, train: bool = True) -> None:
        own = (type(self).dataset, type(self).transform, type(self).dataset_options)
        if any(not function.__module__.startswith(PACKAGE) for function in own):
            return  # samples of a task outside of the package may need a source
        smaller = {view._replace(resolution=min(view.resolution, MAX_TRIED)) for view in views}
        for view in ([None] if train else []) + [*smaller]:
            policy = self.config.augment.auto_augment if view is None else None
            try:
                samples = self.dataset(None, view)
                for draw in range(1 if policy is None else DRAWS):
                    samples[Key(draw, PADDING, 0, view)]
            except Exception as error:  # of timm, without a field
                field = "augment" if policy is None else f"augment.auto_augment: {shown(policy)}"
                raise UserError(
                    f"{field}: the transform fails ({type(error).__name__}: {error}); expected "
                    "values that timm accepts"
                ) from error

    def check_probe(self, model: nn.Module, probe: Probe) -> None:
        if probe.offset and isinstance(model, TimmModel):
            raise UserError(
                "offsets: expected 0, since a model of timm computes its own positions, got "
                f"{probe.offset:g}"
            )

    # Data

    def open(self, *, train: bool = True) -> Splits:
        data = self.config.data
        splits = [data.train_split, data.val_split][0 if train else 1 :]
        options: dict[str, Any] = {
            "train_split": data.train_split,
            "num_classes": data.num_classes,
            "mode": pil_mode(data.in_chans),
            "exif": data.exif_orientation,
        }
        opened: list[Any]
        if data.holdout:
            (everything,) = open_images(data.name, data.root, [data.train_split], **options)
            opened = [*held_out(everything, data.holdout)][0 if train else 1 :]
        else:
            opened = [*open_images(data.name, data.root, splits, **options)]
        if data.cache:
            opened = [CachedImages(source) for source in opened]
        return Splits(opened[0] if train else None, opened[-1])

    def dataset(self, source: Any, view: Any | None) -> Dataset[Any]:
        return ImageDataset(source, self.transform(view), **self.dataset_options(view))

    def dataset_options(self, view: Any | None) -> dict[str, Any]:
        """Return the options of ``ImageDataset`` other than source and transform."""
        config = self.config
        return {
            "seed": config.train.seed,
            "num_classes": config.data.num_classes,
            "channels": config.data.in_chans,
            "skip": config.data.unreadable == "skip",
            "training": view is None,
            "draws_from_numpy": config.augment.auto_augment is not None,
        }

    def transform(self, view: Any | None) -> Any:
        """Return the transform of a view, or of training if it is None."""
        data, augment = self.config.data, self.config.augment
        if view is not None:
            return evaluation_transform(
                (data.in_chans, view.resolution, view.resolution),
                interpolation=augment.interpolation,
                crop_pct=augment.crop_pct,
                mean=data.mean,
                std=data.std,
            )
        return training_transform(
            (data.in_chans, *self.resolution),
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter,
            auto_augment=augment.auto_augment,
            interpolation=augment.interpolation,
            mean=data.mean,
            std=data.std,
        )

    def collate(self, items: list[Any]) -> Batch:
        return collate_images(items)

    def preprocessing(self) -> dict[str, Any]:
        data, augment = self.config.data, self.config.augment
        return {
            "mean": list(data.mean),
            "std": list(data.std),
            "interpolation": augment.interpolation,
            "crop_pct": augment.crop_pct,
        }

    # Model

    def create_model(self) -> nn.Module:
        if self.config.model.name.startswith(TIMM):
            return build_timm_model(self.config)
        return build_vit(self.config)

    def position_parameters(self, model: nn.Module) -> int:
        return int(self.backbone(model).position_parameters())

    def initialize(self, model: nn.Module) -> InitReport:
        return init_from_weights(model, self.config)

    # Training and evaluation

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Tensor:
        targets = batch.targets.to(step.device, non_blocking=True)
        images, targets = self.mix(self.normalize(batch.inputs, step.device), targets)
        place = self.training_positions(unwrap(model), step)
        if place.ndim == 3:  # drawn for all samples of the step: select those of this part
            share, parts = len(images), self.config.train.accumulate
            first = (step.process * parts + step.part) * share
            place = place[first : first + share]
        return self.mix.loss(model(images, place), targets)

    def normalize(self, images: Tensor, device: torch.device) -> Tensor:
        """Return the input of a model from bytes (B, C, ...), on its device."""
        return normalize(images, self.config.data.mean, self.config.data.std, device)

    def training_positions(self, model: Any, step: Step) -> Tensor:
        """Return the perturbed patch centres, (T, N), or (B, T, N) for all samples of a step."""
        train, grid = self.config.train, model.train_grid
        place = coordinates.grid(grid, device=step.device)
        if not train.perturbation:
            return place
        # Drawn for all processes together, so that the draw does not depend on their number.
        return coordinates.perturb(
            place,
            [1 / size for size in grid],
            train.perturbation,
            batch_size=train.batch_size if train.perturbation_per == "sample" else None,
            axes=train.perturbation_axes or None,
            generator=generator(train.seed, "noise", step.number, device=step.device),
        )

    @torch.compiler.set_stance("force_eager")  # every resolution would be compiled again
    @torch.inference_mode()
    def evaluate(
        self,
        model: nn.Module,
        validation: Validation,
        view: Any,
        accelerator: Accelerator,
        *,
        probe: Probe = NO_PROBE,
        advance: Advance = lambda samples: None,
    ) -> dict[str, Any]:
        """Return top-1 in percent, and with few classes the confusion matrix ("confusion").

        With ``probe.offset`` rho, the coordinates of every image, including the class token, are
        shifted by N(0, rho^2) image widths along each axis. Every image has its own draw, with a
        fixed seed.
        """
        self.check_probe(model, probe)
        device, classes = accelerator.device, self.config.data.num_classes
        correct, count = torch.zeros((), device=device), torch.zeros((), device=device)
        confusion = torch.zeros(classes if classes <= MAX_COUNTED else 0, classes, device=device)
        moves = torch.randn(len(validation), self.num_axes, generator=generator("offset"))
        outputs, unreadable = OutputCheck(device), list[str]()
        was_training = model.training
        model.eval()
        for number, batch in enumerate(validation.batches(view)):
            if batch.fatal:
                raise UserError(batch.fatal)
            unreadable += batch.unreadable
            images, targets = self.normalize(batch.inputs, device), batch.targets.to(device)
            place = self.positions(model, images, view)
            if probe.offset:  # by the index of the image, independent of batches
                part = number * accelerator.num_processes + accelerator.process_index
                first = part * len(targets)
                own = torch.arange(first, first + len(targets)).clamp(max=len(validation) - 1)
                place = place + probe.offset * moves[own][:, None].to(place)
            with autocast(self.config.train.precision, device):
                logits = model(images, place)
            outputs.add(logits)
            predicted = logits.argmax(-1)
            correct += (predicted == targets).sum()
            count += (targets != IGNORED).sum()
            if len(confusion):
                own = targets != IGNORED
                ones = torch.ones_like(confusion[0, 0])
                confusion.index_put_((targets[own], predicted[own]), ones, accumulate=True)
            advance(len(targets) * accelerator.num_processes)
        reshard(model)
        model.train(was_training)
        right, seen, skipped, wrong = sum_over_processes(
            accelerator, correct, count, float(len(unreadable)), outputs.wrong
        )
        outputs.require_none(wrong, view)
        if not seen:
            raise UserError(
                f"data.root: no validation image can be read; the first is {unreadable[0]}"
            )
        result: dict[str, Any] = {"top1": 100 * right / seen, "images": seen, "unreadable": skipped}
        if len(confusion):
            counts = [int(n) for n in sum_over_processes(accelerator, *confusion.flatten())]
            result["confusion"] = [counts[i : i + classes] for i in range(0, len(counts), classes)]
        return result

    def positions(self, model: Any, images: Tensor, view: Any) -> Tensor:
        """Return the coordinates of the tokens of images in a view, (T, N)."""
        place: Tensor = model.token_positions(model.patches.grid_shape(images.shape[2:]))
        return place

    # Results

    def summarize(self, source: Any, by_view: dict[str, Any]) -> dict[str, Any]:
        """Return top-1 in every view, and the confusion matrix at the training resolution.

        "confusion" is the matrix, one row of counts per true class; "classes" are the class names,
        if there are any.
        """
        result = super().summarize(source, by_view)
        confusion = by_view.get(str(self.training_view.resolution), {}).get("confusion")
        if confusion is None:
            return result
        classes = getattr(source, "classes", None)
        if classes is not None:  # names of folders may have any bytes
            classes = [files.shown(name) for name in classes]
        return {**result, "classes": classes, "confusion": confusion}

    def format_view(self, name: str) -> str:
        return f"{name} px" if name.isdigit() else name

    def describe(self, view: str, entry: dict[str, Any]) -> str:
        moved = f"  moved by N(0, {entry['offset']:g}²)" if entry.get("offset") else ""
        return super().describe(view, entry) + moved


def normalize(
    images: Tensor, mean: Sequence[float], std: Sequence[float], device: torch.device
) -> Tensor:
    """Return bytes (B, C, ...) on a device, with zero mean and unit standard deviation.

    Args:
        images: The pixels.
        mean, std: Per channel in [0, 1].
        device: Device of the result.
    """
    offset, scale = (_of_channels(tuple(v), images.ndim - 2, device) for v in (mean, std))
    images = images.to(device, non_blocking=True)
    images = images.to(torch.float32, memory_format=torch.contiguous_format)
    return (images - offset) / scale


@functools.cache  # a copy to a GPU for every batch would synchronize
def _of_channels(values: tuple[float, ...], axes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return 255 * torch.tensor(values, device=device).view(1, -1, *[1] * axes)
