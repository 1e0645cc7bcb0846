"""Comparisons as lists of runs, the paper's first: which methods, with which settings."""

from __future__ import annotations

from typing import TypeVar

from comrope.experiments.common.errors import UserError
from comrope.experiments.studies.fair.rows import (
    Ablation,
    Comparison,
    LearnedAngles,
    Tuning,
    Values,
    tuned,
)
from comrope.experiments.studies.study import (
    LABELS,
    OF_ROWS,
    PRESETS,
    Cell,
    Preset,
    Study,
    run_name,
)

__all__ = ["LABELS", "OF_ROWS", "PRESETS", "STUDIES", "Cell", "Preset", "Study", "run_name"]


class Classification(Study):
    def cells(self, preset: Preset) -> list[Cell]:
        return [Cell(m, p) for m in preset.methods for p in preset.perturbations]


class Moved(Study):
    """Rows of the comparison with noise, as they are, their coordinates changed: not absolute ones,
    which end where images do."""

    def cells(self, preset: Preset) -> list[Cell]:
        return [tuned(Cell(m), preset) for m in preset.methods if m != "ape"]


class BlockSize(Study):
    def cells(self, preset: Preset) -> list[Cell]:
        methods = ("liere", "comrope-ap", "comrope-ld")
        return [tuned(Cell(m, block_size=b), preset) for m in methods for b in (2, 4, 8)]


class Perturbation(Study):
    def cells(self, preset: Preset) -> list[Cell]:
        methods = ("ape", "comrope-ld")
        return [tuned(Cell(m, p), preset) for m in methods for p in (0.0, 0.25, 0.5, 0.75, 1.0)]


class Finetune(Study):
    """Without noise on the positions: a model that was pre-trained elsewhere has seen none."""

    def recipe(self, preset: Preset) -> str:
        return _instead(FINETUNED, preset)

    def cells(self, preset: Preset) -> list[Cell]:
        return [Cell(m, perturbation=0.0, finetuned=True) for m in preset.methods]


class Video(Study):
    """Methods and noise as in two dimensions, and one model that is not told the time."""

    def recipe(self, preset: Preset) -> str:
        return _instead(CLIPS, preset)[0]

    def described(self, preset: Preset) -> str:
        return _instead(CLIPS, preset)[1]

    def seeds(self, preset: Preset) -> int:
        return 1 if preset.recipe == "digits" else max(3, preset.seeds)  # a demo may not take long

    def cells(self, preset: Preset) -> list[Cell]:
        told = [Cell(m, p) for m in preset.methods for p in preset.perturbations]
        return [*told, Cell("comrope-ld", preset.perturbations[0], timeless=True)]


class Backwards(Video):
    """Rows of the video study with noise, as they are, on clips that are played backwards too."""

    def cells(self, preset: Preset) -> list[Cell]:
        if preset.recipe == "imagenet":
            raise UserError(
                "preset: UCF-101 has no two classes of which one is the other, backwards; expected "
                "demo or small"
            )
        return [cell for cell in super().cells(preset) if cell.perturbation]


class Detection(Study):
    """As fine-tuning: rotations that start at zero, on top of absolute positions. (Vanilla RoPE's
    do not start at zero.)"""

    def recipe(self, preset: Preset) -> str:
        return _instead(BOXES, preset)[0]

    def recipe_of_start(self, preset: Preset) -> str:
        return "digits_patch4" if preset.recipe == "digits" else preset.recipe

    def described(self, preset: Preset) -> str:
        return _instead(BOXES, preset)[1]

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

FINETUNED = {recipe: f"{recipe}_finetune" for recipe in BOXES}
Entry = TypeVar("Entry")


def _instead(table: dict[str, Entry], preset: Preset) -> Entry:
    if preset.recipe not in table:
        names = ", ".join(name for name, some in PRESETS.items() if some.recipe in table)
        raise UserError(
            f"preset: this study has no recipe beside {preset.recipe}; expected one of {names}"
        )
    return table[preset.recipe]


STUDIES: dict[str, Study] = {
    "classification": Classification("2D classification over resolutions", "Tab. 1"),
    "offset": Moved("Accuracy when the coordinates are moved", "Sec. 4.3.1"),
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
    "backwards": Backwards("Clips played backwards"),
    "detection": Detection(
        "Object detection with a pre-trained backbone",
        "Tab. 2",
        start=Cell("ape", perturbation=0.0),
        decides=("model.ape", "model.init"),
        starts_elsewhere=True,
        one_start=True,
    ),
    "cost": Study("Parameters and time", "Tab. 5 and 7"),
    "comparison": Comparison("Position encodings compared"),
    "tuning": Tuning("Trials of every position encoding, on images held out of training"),
    "ablation": Ablation("ComRoPE-LD and comrope-torus, one thing changed at a time"),
    "values": Values("Values that are rotated besides queries and keys"),
    "units": Moved("Coordinates of another resolution: relative, or counted in patches"),
    "angles": LearnedAngles("What the angles learned"),
}
