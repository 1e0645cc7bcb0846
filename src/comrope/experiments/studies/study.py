"""The definition of a study: rows of a table, their runs, measurements, table and figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import comrope
from comrope import methods
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config, method_fields

__all__ = [
    "METHODS",
    "OF_ROWS",
    "PRESETS",
    "PUBLISHED",
    "Brief",
    "Measurement",
    "Preset",
    "Results",
    "Row",
    "Scale",
    "Start",
    "Study",
    "method_label",
    "packaged",
]

Results = dict[str, Any]  # a results.json, or one of its rows
# Fields that the rows of every study set, so commands cannot set them.
OF_ROWS = ("model.position", "model.block_size", "train.perturbation", "train.seed")
LABELS = {"none": "no positions", "ape": "APE"}  # of models without a rotation
METHODS = (*LABELS, *comrope.METHODS)
# Of published results. A new method is not in their plans; a command adds it with --methods.
PUBLISHED = ("ape", "rope", "rope-mixed", "liere", "comrope-ap", "comrope-ld", "comrope-torus")


def method_label(method: str, *, short: bool = False) -> str:
    """Return the name of a method in tables and figures; ``short`` omits the part in brackets."""
    label = LABELS.get(method) or methods.label(method)
    return label.split(" (")[0] if short else label


@dataclass(frozen=True)
class Preset:
    """A scale of experiments: the recipe of its runs and the number of seeds."""

    name: str
    recipe: str
    data: str  # data and model, for tables
    seeds: int
    together: bool = False  # one run on all GPUs at a time, instead of one run per GPU
    methods: tuple[str, ...] = PUBLISHED
    perturbations: tuple[float, ...] = (1.0, 0.0)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "demo",
            "digits",
            "scikit-learn digits, ViT-nano/2 trained at 12 px",
            seeds=3,
            methods=("ape", "rope", "liere", "comrope-ap", "comrope-ld", "comrope-torus"),
            perturbations=(1.0,),
        ),
        Preset("tiny", "imagenette32", "Imagenette, ViT-nano/4 trained at 32 px", seeds=3),
        Preset("small", "imagenette", "Imagenette, ViT-S/8 trained at 128 px", seeds=3),
        Preset(
            "paper", "imagenet", "ImageNet-1K, ViT-B/16 trained at 224 px", seeds=1, together=True
        ),
    )
}


@dataclass(frozen=True)
class Row:
    """One row of a table: a method with its settings, over several seeds."""

    method: str
    perturbation: float = 1.0
    block_size: int = 8
    fields: tuple[tuple[str, Any], ...] = ()  # set last, after those of the study and the method
    epochs: float = 1.0  # factor on the recipe's epochs
    label: str = ""  # by default that of the method
    finetuned: bool = False  # starts from another run
    max_seeds: int | None = None  # if a command gives no number of seeds

    @property
    def name(self) -> str:
        return self.label or method_label(self.method)

    def with_fields(self, fields: Mapping[str, Any], **changes: Any) -> Row:
        """Return a copy with more fields, and with other changes."""
        return replace(self, fields=tuple({**dict(self.fields), **fields}.items()), **changes)

    def config(self, base: Config, seed: int) -> Config:
        """Return the configuration of one run: the common one with the fields of this row."""
        fields = method_fields(self.method, self.perturbation, self.finetuned)
        fields |= {"model.block_size": self.block_size, "train.seed": seed}
        if self.epochs != 1:
            fields["train.epochs"] = math.ceil(self.epochs * base.train.epochs)
        return base.with_overrides(fields | dict(self.fields))


class Scale(NamedTuple):
    """The recipe of a study at a preset, and a text about its data and model."""

    recipe: str
    data: str


@dataclass(frozen=True)
class Start:
    """A run that the other rows of a study start from, unless train.start_from is given."""

    row: Row
    recipe: Callable[[Preset], str] = lambda preset: preset.recipe
    other_data: bool = False  # its data differ from those of the rows
    shared: bool = False  # all seeds start from the same run
    decides: tuple[str, ...] = ()  # more fields that commands cannot set (see ``OF_ROWS``)


@dataclass(frozen=True)
class Measurement:
    """A measurement of the weights of each run, stored in a file in the run's folder.

    ``run`` is called with the configuration and the folder of a run. Its result becomes part of the
    run in results.json. Entries named in ``averaged`` also get a mean and a standard deviation over
    seeds. A stored result is used again if ``key`` is the same, and with ``needs_data`` also the
    data folder.
    """

    name: str
    run: Callable[[Config, Path], dict[str, Any]]
    needs_data: bool = False
    key: Mapping[str, Any] = field(default_factory=dict)
    averaged: tuple[str, ...] = ()

    def key_of(self, config: Config) -> dict[str, Any]:
        """Return all values, other than the weights, that the result depends on."""
        data = {"root": config.data.root, "crop_pct": config.augment.crop_pct}
        return {**(data if self.needs_data else {}), **self.key}


class Brief(NamedTuple):
    """The short form of a study, for the first page of a document."""

    table: Callable[[Results], str]
    figure: Callable[[Results], Any]


def _no_rows(preset: Preset) -> list[Row]:
    return []


def _seeds_of_preset(preset: Preset) -> int:
    return preset.seeds


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table and a figure: of the paper if ``where`` is set, or an additional one.

    A study has either ``rows``, whose runs are trained, or ``run``, which computes the results.
    """

    name: str
    title: str
    table: Callable[[Results], str]  # Markdown, from the content of results.json
    figure: Callable[[Results], Any]
    where: str = ""  # table or section of the paper
    task: str = ""  # the task that its data must have; by default any
    rows: Callable[[Preset], list[Row]] = _no_rows
    run: Callable[..., Results] | None = None  # (config, methods=, progress=), without training
    scales: Mapping[str, Scale] | None = None  # by name of preset; by default the presets' own
    seeds: Callable[[Preset], int] = _seeds_of_preset
    settings: Callable[[Config], Mapping[str, Any]] = lambda recipe: {}  # commands override these
    start: Start | None = None
    measurement: Measurement | None = None
    collect: Callable[..., dict[str, Any]] | None = None  # (record, config): more values of a run
    artifacts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    parts: Mapping[str, Callable[[Results], str]] = field(default_factory=dict)
    show_settings: bool = True  # below the table, the fields that rows set
    brief: Brief | None = None

    @property
    def trains(self) -> bool:
        """Whether the study trains runs."""
        return self.run is None

    def scale(self, preset: Preset) -> Scale:
        """Return the recipe at a preset, or raise if there is none."""
        if self.scales is None:
            return Scale(preset.recipe, preset.data)
        if preset.name not in self.scales:
            *some, last = self.scales
            choices = f"{', '.join(some)} or {last}" if some else last
            raise UserError(f"preset: {self.name} has no preset {preset.name!r}; choose {choices}")
        return self.scales[preset.name]


def packaged(name: str) -> Any:
    """Return the content of a YAML file of this package."""
    file = resources.files("comrope.experiments.studies").joinpath(name)
    return yaml.safe_load(file.read_text(encoding="utf-8"))
