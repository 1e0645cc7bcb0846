"""The base class of tasks: data, model, loss, metrics and views of one kind of data.

A new kind of data is a subclass of ``Task`` in any package. A recipe selects it: ``task: NAME`` for
a name in ``TASKS``, else ``task: package.module:Class``. The subclass defines the recipe's
``options``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from comrope import positions as coordinates
from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import seed_everything
from comrope.experiments.config import Config
from comrope.experiments.data.batches import AnyBatch, Batch, TrainBatches, Validation
from comrope.experiments.data.workers import create_loader
from comrope.experiments.runs.directory import read_weights
from comrope.experiments.tasks.init_from import InitReport, fit_weights

__all__ = [
    "NO_PROBE",
    "Advance",
    "Coordinates",
    "Probe",
    "Splits",
    "Step",
    "Task",
    "compile_blocks",
]

Advance = Callable[[int], Any]  # called with the number of samples evaluated since the last call
BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
BEFORE = re.compile(r"(?:^|\.)(?:patches|patch_embed|ape|pos_embed|cls_token|reg_token)\b")


class Probe(NamedTuple):
    """A change of the coordinates in evaluation."""

    offset: float = 0.0  # the paper's rho: standard deviation of a shift, in image widths


NO_PROBE = Probe()


class Step(NamedTuple):
    """Where in training a loss is computed."""

    number: int
    part: int  # index of the accumulated part of a step
    process: int
    device: torch.device


class Splits(NamedTuple):
    """The checked samples of a data set."""

    train: Any  # None unless requested
    validation: Any


class Coordinates(NamedTuple):
    """The coordinates of the tokens of a model at training, on N axes, as rotations get them."""

    positions: Tensor  # (T, N)
    scale: Tensor  # (N,), coordinates of one unit
    width: Tensor  # (N,), coordinates from the first token to the last
    unit: str = "image width"  # of frequencies
    extent: str = "image widths"  # unit of a shift of all tokens


class SingleView(NamedTuple):
    """The view of a task with only one view."""

    size: int = 1


class Task(ABC):
    """One kind of data: how to load it, the model to train, and its evaluation.

    A task is a function of its configuration and has no other state, so that loading processes can
    have copies. Its methods are called in this order: ``check`` (by the constructor),
    ``build_model``, ``open``, ``dataset``, ``initialize``, then ``loss`` for every part of every
    step, ``evaluate`` for every view, and ``summarize``.

    Attributes:
        name: Name of the task in recipes.
        headline: The main metric of a result, such as "top1".
        unit: Unit of the headline, such as "%".
        lower_is_better: Whether a smaller headline is a better result.
        samples: Name of the samples in messages and results.
        embedded: Names of data (``data.name``) that come with the package and need no folder.
    """

    name: ClassVar[str]
    headline: ClassVar[str]
    unit: ClassVar[str] = "%"
    lower_is_better: ClassVar[bool] = False
    samples: ClassVar[str] = "samples"
    embedded: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.check()

    # Configuration

    def check(self) -> None:  # noqa: B027
        """Raise ``UserError`` unless the fields that this task uses are valid together."""

    def check_evaluation(self, trained: Config) -> None:
        """Raise unless this configuration can evaluate a model of the configuration ``trained``."""
        if self.config.model != trained.model:
            raise UserError(
                "model: cannot be changed in evaluation; expected the fields of the run"
            )

    @property
    def training_view(self) -> Any:
        """The view of training."""
        return SingleView()

    def views(self, sizes: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the views of evaluation, by their names in results.

        Args:
            sizes: Return the training view at these sizes, such as resolutions; by default the
                views of the configuration.
        """
        if sizes is not None:
            raise UserError(f"resolutions: the task {self.name} has none; expected no option")
        return {"all": self.training_view}

    def check_view(self, model: nn.Module, view: Any) -> None:  # noqa: B027
        """Raise unless the model can be evaluated in a view."""

    def check_probe(self, model: nn.Module, probe: Probe) -> None:
        """Raise unless the model can be evaluated with a probe."""
        if probe.offset:
            raise UserError(f"offsets: the coordinates of {self.name} cannot be moved; expected 0")

    def try_transforms(self, views: Iterable[Any], *, train: bool = True) -> None:  # noqa: B027
        """Transform a made-up sample as in training and in some views, before data is opened.

        It takes milliseconds and changes no generator. By default nothing is tried.

        Args:
            views: The views.
            train: Whether the transform of training is tried too.

        Raises:
            UserError: A transform fails with the fields of this configuration.
        """

    # Data

    def has_data(self) -> bool:
        """Return whether there is something to open: embedded data, or a folder that exists."""
        data = self.config.data
        return data.name in self.embedded if data.root is None else Path(data.root).exists()

    @abstractmethod
    def open(self, *, train: bool = True) -> Splits:
        """Open and check the validation source, and the training source if ``train``."""

    @abstractmethod
    def dataset(self, source: Any, view: Any | None) -> Dataset[Any]:
        """Return the samples of a source by ``Key``, in a view; None is training."""

    def collate(self, items: list[Any]) -> AnyBatch:
        """Return a batch of items of the data set; by default an item is (input, target)."""
        return Batch(*default_collate(items))

    def training_batches(self, size: int, *, process: int = 0, processes: int = 1) -> TrainBatches:
        """Return this process's batches of a training set of ``size`` samples."""
        train = self.config.train
        return TrainBatches(
            size,
            batch_size=train.batch_size,
            epochs=train.epochs,
            seed=train.seed,
            parts=train.accumulate,
            repeats=self.config.augment.repeats,
            process=process,
            processes=processes,
        )

    def training_loader(self, source: Any, batches: TrainBatches) -> DataLoader[Any]:
        """Return the loader of some training batches."""
        return create_loader(
            self.dataset(source, None),
            batches,
            self.collate,
            workers=self.config.data.workers,
            pin_memory=self._pin_memory,
        )

    def validation(self, source: Any, *, process: int = 0, processes: int = 1) -> Validation:
        """Return this process's share of a validation set; the caller closes it."""
        return Validation(
            source,
            partial(self.dataset, source),
            self.collate,
            training_view=self.training_view,
            batch_size=self.config.evaluate.batch_size,
            process=process,
            processes=processes,
            workers=self.config.data.workers,
            pin_memory=self._pin_memory,
        )

    @property
    def _pin_memory(self) -> bool:
        return torch.cuda.is_available() and self.config.train.device != "cpu"

    def describe_data(self, source: Any) -> str:
        """Return a line about the training data."""
        return f"{len(source)} training {self.samples}"

    def left_out(self, source: Any) -> dict[str, list[Any]]:
        """Return what training does not use of a source, such as ids of annotations, by reason."""
        return dict(getattr(source, "left_out", {}))

    def preprocessing(self) -> dict[str, Any]:
        """Return JSON values that make inputs of an exported model, such as mean and std."""
        return {}

    # Model

    def build_model(self) -> nn.Module:
        """Return the model with its initial weights, a function of the configuration alone."""
        seed_everything(self.config.train.seed, "start")
        return self.create_model()

    @abstractmethod
    def create_model(self) -> nn.Module:
        """Return the model; the caller has seeded the global generators."""

    def backbone(self, model: nn.Module) -> Any:
        """Return the part of a model that encodes positions, such as the ViT of a detector."""
        return model

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the repeated blocks of a model, which are compiled and sharded one by one."""
        return getattr(self.backbone(model), "blocks", ())

    def compile(self, model: nn.Module) -> None:
        """Compile a model in place for training."""
        if blocks := list(self.blocks(model)):
            compile_blocks(blocks)
        else:
            model.compile()

    def layer_of(self, name: str) -> int | None:
        """Return the layer of a parameter, for ``optim.layer_decay``.

        0 is before the blocks, None is after them.
        """
        if found := BLOCK.search(name):
            return 1 + int(found[1])
        return 0 if BEFORE.search(name) else None

    def position_parameters(self, model: nn.Module) -> int:
        """Return the number of parameters that encode positions."""
        found = rotary_modules(model).values()
        return sum(parameter.numel() for module in found for parameter in module.parameters())

    def coordinates(self, model: nn.Module) -> Coordinates:
        """Return the coordinates of a model's tokens; by default those of a ViT's patches.

        Raises:
            UserError: The model has none.
        """
        found = self.backbone(model)
        if not hasattr(found, "train_grid"):
            raise UserError(
                f"run: expected a model with positions, the task {self.name} has a "
                f"{type(found).__name__}"
            )
        scale = torch.tensor(found.axis_scale or (1.0,) * found.num_axes)
        return Coordinates(scale * coordinates.grid(found.train_grid), scale, scale)

    def initialize(self, model: nn.Module) -> InitReport:
        """Load the weights of the run ``train.start_from`` into a model, sharded or not."""
        start = str(self.config.train.start_from)
        return fit_weights(model, read_weights(Path(start), "train.start_from")[1], start)

    def prepare(self, model: nn.Module, accelerator: Accelerator) -> None:  # noqa: B027
        """Prepare a model on its device for training, before weights are loaded."""

    # Training and evaluation

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, step: Step) -> Tensor:
        """Return the mean loss of a batch. The model may be wrapped (``unwrap``)."""

    @abstractmethod
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
        """Return the metrics of a validation set, the same in every process.

        They contain the headline, the number of samples with the key ``samples``, and the number of
        unreadable samples with the key "unreadable".
        """

    # Results

    def log_values(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the values to log after an evaluation during training."""
        return {self.headline: found[self.headline]}

    def summarize(self, source: Any, by_view: dict[str, Any]) -> dict[str, Any]:
        """Return this task's part of a run's result, from the evaluations in all views."""
        return {self.headline: {name: found[self.headline] for name, found in by_view.items()}}

    def merge(self, result: dict[str, Any], by_view: dict[str, Any]) -> None:
        """Add evaluations in more views to a run's result, in place."""
        result[self.headline].update({n: found[self.headline] for n, found in by_view.items()})

    def format_value(self, value: float | None) -> str:
        """Return the headline as text with its unit; "–" for None."""
        return "–" if value is None else f"{value:.2f} {self.unit}".rstrip()

    def format_view(self, name: str) -> str:
        """Return a view's name as text, with a unit if it has one."""
        return name

    def describe(self, view: str, entry: dict[str, Any]) -> str:
        """Return one line about an evaluation; the entry contains at least the headline."""
        return f"{self.format_view(view):>8}  {self.format_value(entry[self.headline]):>8}"


def compile_blocks(blocks: Iterable[nn.Module], dynamic: bool | None = None) -> None:
    """Compile blocks one by one; they share a compilation, so this is faster than one model."""
    blocks = list(blocks)
    for block in blocks:
        block.compile(dynamic=dynamic)
    # The blocks share their code; each rate of drop path needs another compilation.
    torch._dynamo.config.recompile_limit += 4 * len(blocks)
