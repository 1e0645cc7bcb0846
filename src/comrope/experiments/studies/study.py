"""What studies are made of: scales, rows of a table, and the folders of their runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from comrope.experiments.config import Config, decisive, method_fields

# What the rows of a study decide, so that a command cannot.
OF_ROWS = ("model.position", "model.block_size", "train.perturbation", "train.seed")
# Fields that came later: unless they say something, runs from before keep their names.
LATER = (
    "task",
    "options.",
    "model.ape",
    "model.rotate_values",
    "model.locality_bias",
    "model.spread",
    "model.tubelet",
    "model.axis_scale",
    "data.frames",
    "data.holdout",
    "augment.frames",
    "train.start_from",
    "train.perturbation_axes",
    "train.rescale",
    "optim.basis_lr_scale",
    "optim.angle_weight_decay",
    "optim.layer_decay",
    "detect.",
)

# What fields and values were called when names were given first.
FIRST_NAMES = {
    "model.locality_bias": "model.near",
    "model.position_units": "model.rope_units",
    "rope-random-axes": "turned",
    "isotropic": "scattered",
}

__all__ = ["LABELS", "OF_ROWS", "PRESETS", "Cell", "Preset", "Study", "packaged", "run_name"]

LABELS = {
    "none": "no positions",
    "ape": "APE",
    "rope": "vanilla RoPE",
    "rope-mixed": "RoPE-Mixed",
    "liere": "LieRE",
    "comrope-ap": "ComRoPE-AP",
    "comrope-ld": "ComRoPE-LD",
    "comrope-torus": "comrope-torus (all commuting)",
}
ALL = tuple(LABELS)[1:]


@dataclass(frozen=True)
class Preset:
    """A scale: the recipe that every run starts from, and how often each is repeated."""

    recipe: str
    data: str  # what to call it in a table, unless the command changes it
    seeds: int
    together: bool  # one run over all GPUs at a time, rather than a run on each
    methods: tuple[str, ...] = ALL
    perturbations: tuple[float, ...] = (1.0, 0.0)


PRESETS = {
    "demo": Preset(
        "digits",
        "scikit-learn digits, ViT-nano/2 trained at 12 px",
        seeds=3,
        together=False,
        methods=("ape", "rope", "liere", "comrope-ap", "comrope-ld", "comrope-torus"),
        perturbations=(1.0,),
    ),
    "tiny": Preset(
        "imagenette32",
        "Imagenette, ViT-nano/4 trained at 32 px",
        seeds=3,
        together=False,
    ),
    "small": Preset("imagenette", "Imagenette, ViT-S/8 trained at 128 px", 3, together=False),
    "paper": Preset("imagenet", "ImageNet-1K, ViT-B/16 trained at 224 px", 1, together=True),
}


@dataclass(frozen=True)
class Cell:
    """One row of a table: a method with its settings, over several seeds."""

    method: str
    perturbation: float = 1.0
    block_size: int = 8
    finetuned: bool = False  # it starts from another run
    longer: float = 1.0  # times as many epochs as the others
    timeless: bool = False  # clips whose frames have no order: what must fail where order matters
    fields: tuple[tuple[str, Any], ...] = ()  # its own, whatever the others say
    name: str = ""  # by default its method's

    def config(self, base: Config, seed: int) -> Config:
        """What a row has in common with the others, and what is its own."""
        fields = method_fields(self.method, self.perturbation, self.finetuned)
        fields |= {"model.block_size": self.block_size, "train.seed": seed}
        if self.longer != 1:
            fields["train.epochs"] = math.ceil(self.longer * base.train.epochs)
        if self.timeless:
            fields["model.axis_scale"] = (0.0, 1.0, 1.0)
        return base.with_overrides(fields | dict(self.fields))


@dataclass(frozen=True)
class Study:
    """A table or figure, of the paper if it says where; without ``cells`` nothing is trained."""

    title: str
    where: str = ""
    start: Cell | None = None  # what the other runs start from, unless train.start_from is given
    decides: tuple[str, ...] = ()  # fields, besides those that every study decides
    starts_elsewhere: bool = False  # what they start from was trained on other data
    one_start: bool = False  # all seeds start from the same run

    def recipe(self, preset: Preset) -> str:
        return preset.recipe

    def recipe_of_start(self, preset: Preset) -> str:
        return preset.recipe

    def settings(self, recipe: Config) -> dict[str, Any]:
        """Fields that this study sets otherwise than its recipe; a command may, too."""
        return {}

    def described(self, preset: Preset) -> str:
        return preset.data

    def seeds(self, preset: Preset) -> int:
        return preset.seeds

    def seeds_of(self, cell: Cell, preset: Preset) -> int:
        """Of one row, where a command does not say."""
        return self.seeds(preset)

    def cells(self, preset: Preset) -> list[Cell]:
        return []


def packaged(name: str) -> Any:
    """What is written in a YAML file that comes with comrope."""
    return yaml.safe_load(resources.files("comrope.experiments.studies").joinpath(name).read_text())


def run_name(config: Config) -> str:
    """A folder for a configuration: readable, and the same for the same configuration only."""
    usual, found = decisive(Config()), decisive(config)
    if config.train.start_from:
        found["train.start_from"] = Path(os.path.abspath(config.train.start_from)).name
    fields = [
        (name, value)
        for name, value in found.items()
        if not name.startswith(LATER) or (value or None) != (usual.get(name) or None)
    ]
    fields = [
        (
            FIRST_NAMES.get(name, name),
            FIRST_NAMES.get(value, value) if name == "model.init" else value,
        )
        for name, value in fields
    ]
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:8]
    model, train = config.model, config.train
    return f"{model.position}-b{model.block_size}-p{train.perturbation:g}-s{train.seed}-{digest}"
