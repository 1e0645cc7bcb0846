"""What a run learns, and how well: classes of images and clips, or boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from comrope import positions as coordinates
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import generator
from comrope.experiments.config import Config
from comrope.experiments.data.batches import Normalize, Validation
from comrope.experiments.data.coco import METRICS
from comrope.experiments.tasks.init_from import begin_with
from comrope.experiments.tasks.views import View, usual_view
from comrope.experiments.training.evaluate import accuracy, vit_of
from comrope.experiments.training.optim import Soften

__all__ = ["Objective", "objective_of"]

Advance = Callable[[int], Any]


class Objective(ABC):
    """A loss to train by, and figures to evaluate by, of the model of a configuration."""

    figures: tuple[str, ...]  # of an evaluation: what they are called

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self.config, self.accelerator, self.device = config, accelerator, accelerator.device

    @abstractmethod
    def loss(self, run: Any, batch: Any, part: int) -> Tensor:
        """Of one of the parts of a step."""

    @abstractmethod
    def evaluate(
        self, model: Any, validation: Validation, view: View, advance: Advance, offset: float = 0.0
    ) -> dict[str, Any]:
        """The figures, how many images they are of and how many could not be read."""

    @abstractmethod
    def begin(self, model: Any) -> dict[str, Any]:
        """Fill the model with the weights of ``train.start_from``; what is known of them."""

    @abstractmethod
    def summary(self, source: Any, results: dict[str, Any]) -> dict[str, Any]:
        """Of the evaluations in all views: what becomes part of a run's result."""

    def logged(self, found: dict[str, Any]) -> dict[str, Any]:
        """Of an evaluation during training."""
        return {name: found[name] for name in self.figures if name in found}


class Classification(Objective):
    figures = ("top1",)

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        super().__init__(config, accelerator)
        self.normalize, self.soften = Normalize(config, self.device), Soften(config)

    def loss(self, run: Any, batch: Any, part: int) -> Tensor:
        targets = batch.targets.to(self.device, non_blocking=True)
        images, targets = self.soften(self.normalize(batch.images), targets)
        place = self.positions(run)
        if place.ndim == 3:
            share, parts = len(images), self.config.train.accumulate
            first = (self.accelerator.process_index * parts + part) * share
            place = place[first : first + share]
        return self.soften.loss(run.model(images, place), targets)

    def positions(self, run: Any) -> Tensor:
        """Of the patches: their centres, or where they were moved to, for the whole batch."""
        train, grid = self.config.train, run.bare.train_grid
        place = coordinates.grid(grid, device=self.device)
        # Drawn for all processes at once, so that it does not depend on their number.
        samples = train.batch_size if train.perturbation_per == "sample" else None
        if train.perturbation:
            place = coordinates.perturb(
                place,
                [1 / size for size in grid],
                train.perturbation,
                batch_size=samples,
                axes=train.perturbation_axes or None,
                generator=generator(train.seed, "noise", run.step, device=self.device),
            )
        if train.rescale > 1:
            place = coordinates.rescale(
                place,
                train.rescale,
                batch_size=samples if place.ndim == 2 else None,
                generator=generator(train.seed, "scale", run.step, device=self.device),
            )
        return place

    def evaluate(
        self, model: Any, validation: Validation, view: View, advance: Advance, offset: float = 0.0
    ) -> dict[str, Any]:
        return accuracy(
            model, self.config, validation, view, self.accelerator, offset=offset, advance=advance
        )

    def begin(self, model: Any) -> dict[str, Any]:
        return begin_with(model, self.config)

    def summary(self, source: Any, results: dict[str, Any]) -> dict[str, Any]:
        """What was taken for what as it was trained, with names where there are some."""
        top1 = {name: found["top1"] for name, found in results.items()}
        taken_for = results.get(str(usual_view(self.config).resolution), {}).get("taken_for")
        if taken_for is None:
            return {"top1": top1}
        names = getattr(source, "classes", None)
        return {"top1": top1, "classes": names, "taken_for": taken_for}


class Detection(Objective):
    figures = (*METRICS, "masks")

    def loss(self, run: Any, batch: Any, part: int) -> Tensor:
        from comrope.experiments.tasks.detection import detection_loss

        return detection_loss(run.model, batch, self.device)

    def evaluate(
        self, model: Any, validation: Validation, view: View, advance: Advance, offset: float = 0.0
    ) -> dict[str, Any]:
        if offset:
            raise UserError("offsets: the coordinates of a detector cannot be moved; expected 0")
        from comrope.experiments.tasks.detection import average_precision

        return average_precision(
            model, self.config, validation, view, self.accelerator, advance=advance
        )

    def begin(self, model: Any) -> dict[str, Any]:
        from comrope.experiments.tasks.detection import begin_detector

        return begin_detector(vit_of(model), self.config)

    def summary(self, source: Any, results: dict[str, Any]) -> dict[str, Any]:
        figures = {name: self.logged(found) for name, found in results.items()}
        ap = {name: found["AP"] for name, found in results.items()}
        return {"AP": ap, "figures": figures, "classes": source.classes}


def objective_of(config: Config, accelerator: Accelerator) -> Objective:
    return (Detection if config.detects else Classification)(config, accelerator)
