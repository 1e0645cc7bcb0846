"""The paper's comparisons as lists of runs: which methods, with which settings, at which scale."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from comrope.experiments.config import Config, decisive

# What the rows of a study decide, so that a command cannot.
OF_ROWS = ("model.position", "model.block_size", "train.perturbation", "train.seed")
# Fields that came later: unless they say something, runs from before keep their names.
LATER = (
    "model.ape",
    "model.tubelet",
    "model.axis_scale",
    "data.frames",
    "augment.frames",
    "train.start_from",
    "train.perturbation_axes",
    "optim.layer_decay",
    "detect.",
)

__all__ = ["LABELS", "OF_ROWS", "PRESETS", "STUDIES", "Cell", "Preset", "Study", "run_name"]

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
    timeless: bool = False  # clips whose frames have no order: what must fail where order matters

    def config(self, base: Config, seed: int) -> Config:
        """What a row has in common with the others, and what is its own."""
        fields: dict[str, Any] = {
            "model.position": self.method,
            "model.block_size": self.block_size,
            "train.perturbation": self.perturbation,
            "train.seed": seed,
        }
        if self.method == "liere":  # it needs an exponential for every new position
            fields["train.perturbation_per"] = "batch"
        if self.finetuned:
            # Rotations on top of the absolute positions, switched off at the start: all but vanilla
            # RoPE's, which are fixed.
            fields["model.ape"] = self.method != "ape"
            fields["model.init"] = "normal" if self.method in ("ape", "rope") else "zeros"
        if self.timeless:
            fields["model.axis_scale"] = (0.0, 1.0, 1.0)
        return base.with_overrides(fields)


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper; without ``cells`` nothing is trained for it."""

    title: str
    where: str
    start: Cell | None = None  # what the other runs start from, unless train.start_from is given
    decides: tuple[str, ...] = ()  # fields, besides those that every study decides
    starts_elsewhere: bool = False  # what they start from was trained on other data

    def recipe(self, preset: Preset) -> str:
        return preset.recipe

    def recipe_of_start(self, preset: Preset) -> str:
        return preset.recipe

    def described(self, preset: Preset) -> str:
        return preset.data

    def seeds(self, preset: Preset) -> int:
        return preset.seeds

    def cells(self, preset: Preset) -> list[Cell]:
        return []


class Classification(Study):
    def cells(self, preset: Preset) -> list[Cell]:
        return [Cell(m, p) for m in preset.methods for p in preset.perturbations]


class Offset(Study):
    def cells(self, preset: Preset) -> list[Cell]:
        return [Cell(m) for m in preset.methods if m != "ape"]


class BlockSize(Study):
    def cells(self, preset: Preset) -> list[Cell]:
        methods = ("liere", "comrope-ap", "comrope-ld")
        return [Cell(m, block_size=b) for m in methods for b in (2, 4, 8)]


class Perturbation(Study):
    def cells(self, preset: Preset) -> list[Cell]:
        methods = ("ape", "comrope-ld")
        return [Cell(m, p) for m in methods for p in (0.0, 0.25, 0.5, 0.75, 1.0)]


class Finetune(Study):
    """Without noise on the positions: a model that was pre-trained elsewhere has seen none."""

    def recipe(self, preset: Preset) -> str:
        return f"{preset.recipe}_finetune"

    def cells(self, preset: Preset) -> list[Cell]:
        return [Cell(m, perturbation=0.0, finetuned=True) for m in preset.methods]


class Video(Study):
    """Methods and noise as in two dimensions, and one model that is not told the time."""

    def recipe(self, preset: Preset) -> str:
        return CLIPS[preset.recipe][0]

    def described(self, preset: Preset) -> str:
        return CLIPS[preset.recipe][1]

    def seeds(self, preset: Preset) -> int:
        return 1 if preset.recipe == "digits" else max(3, preset.seeds)  # a demo may not take long

    def cells(self, preset: Preset) -> list[Cell]:
        told = [Cell(m, p) for m in preset.methods for p in preset.perturbations]
        return [*told, Cell("comrope-ld", preset.perturbations[0], timeless=True)]


class Detection(Study):
    """As fine-tuning: rotations that start at zero, on top of absolute positions. (Vanilla RoPE's
    do not start at zero.)"""

    def recipe(self, preset: Preset) -> str:
        return BOXES[preset.recipe][0]

    def recipe_of_start(self, preset: Preset) -> str:
        return "digits_patch4" if preset.recipe == "digits" else preset.recipe

    def described(self, preset: Preset) -> str:
        return BOXES[preset.recipe][1]

    def seeds(self, preset: Preset) -> int:
        return 1 if preset.recipe == "digits" else preset.seeds

    def cells(self, preset: Preset) -> list[Cell]:
        methods = [m for m in preset.methods if m != "rope"]
        return [Cell(m, perturbation=0.0, finetuned=True) for m in methods]


# In place of the images of a preset: a recipe, and what to call it.
BOXES = {
    "digits": ("scenes", "digits scattered over 48 px, Faster R-CNN over ViT-nano/4"),
    "imagenette": ("bccd", "BCCD at 320 px, Faster R-CNN over ViT-S/8"),
    "imagenet": ("coco", "COCO at 1,024 px, Mask R-CNN over ViT-S/16"),
}
CLIPS = {
    "digits": ("moving", "shapes that move to the left or to the right, ViT-nanovideo"),
    "imagenette": ("gesture5", "gesture5, the paper's 3D ViT at 112 px"),
    "imagenet": ("ucf101", "UCF-101, the paper's 3D ViT at 224 px"),
}

STUDIES: dict[str, Study] = {
    "classification": Classification("2D classification over resolutions", "Tab. 1"),
    "offset": Offset("Accuracy when the coordinates are moved", "Sec. 4.3.1"),
    "block-size": BlockSize("Block size", "Sec. 4.3.2"),
    "perturbation": Perturbation("Perturbation intensity", "Sec. 4.3.3"),
    "distribution": BlockSize("Distribution of the angles", "Tab. 6"),
    "finetune": Finetune(
        "Fine-tuning a model that was pre-trained with APE",
        "Tab. 4",
        start=Cell("ape", perturbation=0.0),
        decides=("model.ape", "model.init"),
    ),
    "video": Video("3D classification of clips", "Tab. 3"),
    "detection": Detection(
        "Object detection with a pre-trained backbone",
        "Tab. 2",
        start=Cell("ape", perturbation=0.0),
        decides=("model.ape", "model.init"),
        starts_elsewhere=True,
    ),
    "cost": Study("Parameters and time", "Tab. 5 and 7"),
}


def run_name(config: Config) -> str:
    """A folder for a configuration: readable, and the same for the same configuration only."""
    usual = decisive(Config())
    fields = [
        (name, value)
        for name, value in decisive(config).items()
        if not name.startswith(LATER) or (value or None) != (usual[name] or None)
    ]
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:8]
    model, train = config.model, config.train
    return f"{model.position}-b{model.block_size}-p{train.perturbation:g}-s{train.seed}-{digest}"
