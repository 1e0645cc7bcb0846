"""Classification of clips: images with a third axis, time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import TIMM, Config
from comrope.experiments.data.datasets import ClipDataset
from comrope.experiments.data.images import pil_mode
from comrope.experiments.data.videos import CachedVideos, open_clips
from comrope.experiments.tasks.base import Splits
from comrope.experiments.tasks.build import build_vit
from comrope.experiments.tasks.images import ImageTask

__all__ = ["ClipTask", "ClipView"]


class ClipView(NamedTuple):
    """A way to take clips from videos for evaluation."""

    resolution: int
    frames: int
    span: float = 1.0  # share of the video that a clip covers
    reversed: bool = False  # from the last frame to the first

    @property
    def size(self) -> int:
        """Pixels of a clip."""
        return self.resolution**2 * self.frames


class ClipTask(ImageTask):
    """Classes of clips, by a ViT of comrope on three axes: time, rows and columns."""

    name = "clips"
    embedded = ("moving",)
    num_axes = 3

    # Configuration

    def check_frames(self) -> None:
        """Raise unless the fields for clips are valid."""
        config, frames = self.config, self.config.data.frames
        if not frames:
            raise UserError(f"data.frames: expected at least 1 for {config.data.name}, got 0")
        if config.data.holdout:
            raise UserError(
                f"data.holdout: clips cannot be held out; expected 0, got {config.data.holdout:g}"
            )
        if config.data.exif_orientation:
            raise UserError("data.exif_orientation: is for images only; expected false, got true")
        if frames % config.model.tubelet:
            raise UserError(
                f"model.tubelet: expected a divisor of data.frames {frames}, got "
                f"{config.model.tubelet}"
            )
        for name in ("cutmix", "erase"):
            if value := getattr(config.augment, name):
                raise UserError(f"augment.{name}: is for images only; expected 0, got {value:g}")
        if config.model.name.startswith(TIMM):
            raise UserError(
                f"data.frames: {config.model.name} is for images only; expected 0, got {frames}"
            )

    def check_evaluation(self, trained: Config) -> None:
        super().check_evaluation(trained)
        if self.config.data.frames != trained.data.frames:
            raise UserError(
                "data.frames: cannot be changed in evaluation; evaluate.frames sets other numbers"
            )

    @property
    def training_view(self) -> ClipView:
        return ClipView(self.resolution[0], self.config.data.frames)

    def views(self, sizes: Sequence[int] | None = None) -> dict[str, Any]:
        """Return a view for every resolution; by default also for frames, spans and reversal.

        Each view differs from the training view in one property.
        """
        views, usual, evaluate = super().views(sizes), self.training_view, self.config.evaluate
        if sizes is None:
            views |= {f"{n} frames": usual._replace(frames=n) for n in evaluate.frames}
            views |= {f"{s:g} of the video": usual._replace(span=s) for s in evaluate.spans}
            if evaluate.reversed:
                views["reversed"] = usual._replace(reversed=True)
        return views

    def check_view(self, model: nn.Module, view: ClipView) -> None:
        super().check_view(model, view)
        tubelet = self.backbone(model).patches.patch_size[0]
        if view.frames < tubelet or view.frames % tubelet:
            raise UserError(
                f"evaluate.frames: expected multiples of model.tubelet {tubelet}, got {view.frames}"
            )

    # Data

    def open(self, *, train: bool = True) -> Splits:
        data = self.config.data
        opened = open_clips(
            data.name,
            data.root,
            (data.train_split, data.val_split),
            num_classes=data.num_classes,
            mode=pil_mode(data.in_chans),
            skip=data.unreadable == "skip",
            train=train,
        )
        if data.cache:
            opened = [CachedVideos(source) for source in opened]
        return Splits(opened[0] if train else None, opened[-1])

    def dataset(self, source: Any, view: ClipView | None) -> Dataset[Any]:
        seen = view or self.training_view
        return ClipDataset(
            source,
            self.transform(view),
            frames=seen.frames,
            span=seen.span,
            backwards=seen.reversed,
            random_frames=view is None and self.config.augment.frames == "random",
            **self.dataset_options(view),
        )

    # Model

    def create_model(self) -> nn.Module:
        model = self.config.model
        patch = int(model.name.split("_patch")[1].split("_")[0])
        return build_vit(
            self.config,
            img_size=(self.config.data.frames, *self.resolution),
            patch_size=(model.tubelet, patch, patch),
        )

    # Training and evaluation

    def positions(self, model: Any, images: Tensor, view: ClipView) -> Tensor:
        """Return the coordinates of the tokens: a span of the video covers a span of the axis."""
        place = super().positions(model, images, view)
        if view.span == 1:
            return place
        time = 0.5 + view.span * (place[:, :1] - 0.5)
        return torch.cat((time, place[:, 1:]), dim=1)
