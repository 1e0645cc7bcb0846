"""Studies that the paper does not have: a comparison, the search before it, and what matters.

The comparison gives every row the settings that a search found for it, with as many trials for
each, on training images that were held out: the validation set has no part in any choice. What was
not searched at a scale has the recipe's settings, or those of trials at another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from comrope.experiments.config import Config, load_recipe
from comrope.experiments.studies.study import LABELS, Cell, Preset, Study, packaged

__all__ = [
    "ADDED",
    "EVERY",
    "OURS",
    "ROWS",
    "SEARCHED",
    "Ablation",
    "Comparison",
    "LearnedAngles",
    "Tuning",
    "Values",
    "full_rows",
    "row_key",
    "tuned",
]

OURS = ("comrope-ap", "comrope-ld", "comrope-torus")
PATCH_UNITS = "vanilla RoPE, patch units"
ROWS = (
    Cell("ape"),
    # The paper's [0, 1] coordinates, taken at their word; and RoPE the way that it is used.
    Cell(
        "rope", fields=(("model.position_units", "relative"),), name="vanilla RoPE, relative units"
    ),
    Cell("rope", fields=(("model.position_units", "patch"),), name=PATCH_UNITS),
    Cell("rope-mixed"),
    Cell("liere"),
    *map(Cell, OURS),
)
CONTROL = Cell("none", perturbation=0.0)  # noise on the coordinates means nothing to it
# What can be added to any rotation: values that turn, and heads that start near.
TAKE_MORE = ("rope", "rope-mixed", "liere", OURS[-1])
ADDED = ("model.rotate_values", "model.locality_bias")
VALUES_TOO: dict[str, Any] = {"model.rotate_values": True}
# Where all rotations start in the study of what is added: with the same frequencies.
ALIKE: dict[str, Any] = {"model.init": "rope-random-axes", "model.base": 100.0}
# What takes less time a step can train longer: on two CPU cores, torus with all that can be added
# takes 1.2 to 1.3 times as long a step as vanilla RoPE (docs/results.md).
A_QUARTER = 1.25
HELD_OUT = 0.2
# What decides how all weights learn is searched with one row, and found for all of them.
SEARCHED, EVERY = "ape", "every row"
SEEDS_OF_A_TRIAL = 1
SEEDS_WITHOUT_NOISE = 3  # at the most: the rows with noise are those that decide

# Starts as in search.yaml; whatever a row has of others is unset.
STARTS: dict[str, dict[str, Any]] = {
    "starts at random": {"model.init": "normal", "model.base": None, "model.spread": 1.0},
    "starts as RoPE in patch units, base 100": {
        "model.init": "rope",
        "model.position_units": "patch",
        "model.base": 100.0,
        "model.spread": 1.0,
    },
    "starts as RoPE in relative units, base 100": {
        "model.init": "rope",
        "model.position_units": "relative",
        "model.base": 100.0,
        "model.spread": 1.0,
    },
    "starts as RoPE with turned axes, base 10": {
        "model.init": "rope-random-axes",
        "model.position_units": "patch",
        "model.base": 10.0,
        "model.spread": 1.0,
    },
    "starts scattered, base 10": {
        "model.init": "isotropic",
        "model.position_units": "patch",
        "model.base": 10.0,
        "model.spread": 1.0,
    },
}


class Decisive(Study):
    """With as many seeds as small differences take, where runs are short."""

    def seeds(self, preset: Preset) -> int:
        return 5 if preset.recipe.startswith("imagenette") else preset.seeds


class Comparison(Decisive):
    def seeds_of(self, cell: Cell, preset: Preset) -> int:
        most = self.seeds(preset)
        return most if cell.perturbation else min(SEEDS_WITHOUT_NOISE, most)

    def cells(self, preset: Preset) -> list[Cell]:
        rows = [tuned(row, preset) for row in ROWS]
        every = [replace(row, perturbation=p) for row in rows for p in preset.perturbations]
        full = [tuned(row, preset) for row in full_rows()]
        cheap = [row for row in (*rows, *full) if row.name in (PATCH_UNITS, _full_name("rope"))]
        longer = [
            replace(row, longer=A_QUARTER, name=f"{row.name}, a quarter longer") for row in cheap
        ]
        return [*every, *full, *longer, tuned(CONTROL, preset)]


class Values(Decisive):
    """Rotations that start alike, as they are, and with what can be added to each, one upon the
    other; nothing is searched."""

    def cells(self, preset: Preset) -> list[Cell]:
        found = []
        for method in (m for m in TAKE_MORE if m in preset.methods):
            taken = [name for name in ALIKE if method != "rope" or name != "model.init"]
            row = _with(Cell(method), {name: ALIKE[name] for name in taken})
            more = _with(row, VALUES_TOO, name=f"{_short(method)}, values too")
            found += [row, more, _with(more, _near(method), name=_full_name(method))]
        return found


class HeldOut(Study):
    """Shorter than the real training, and on a part of its images: what is found here may be chosen
    for the comparison."""

    def settings(self, recipe: Config) -> dict[str, Any]:
        return {"data.holdout": HELD_OUT, "train.epochs": max(1, recipe.train.epochs // 2)}


class Tuning(HeldOut):
    """The trials of search.yaml."""

    def seeds(self, preset: Preset) -> int:
        return SEEDS_OF_A_TRIAL

    def cells(self, preset: Preset) -> list[Cell]:
        trials, common = packaged("fair/search.yaml"), _found(EVERY, preset)
        return [
            _with(row, trial if row_key(row) == SEARCHED else {**common, **trial})
            for row in (*ROWS, *full_rows())
            for trial in trials[row_key(row)]
        ]


class Ablation(HeldOut):
    """Around rows of the comparison, as they are there."""

    def cells(self, preset: Preset) -> list[Cell]:
        rows = [tuned(row, preset) for row in ROWS if row.method in OURS[1:]]
        return [cell for row in rows for cell in _around(row, load_recipe(self.recipe(preset)))]


class LearnedAngles(Study):
    """Rows of the comparison with noise that learn and that have a spectrum."""

    def seeds(self, preset: Preset) -> int:
        return 1

    def cells(self, preset: Preset) -> list[Cell]:
        with_spectrum = ("rope-mixed", *OURS)
        return [tuned(Cell(m), preset) for m in preset.methods if m in with_spectrum]


def row_key(row: Cell) -> str:
    """What search.yaml and tuned.yaml call it. Vanilla RoPE is in patch units by default."""
    return row.name or (PATCH_UNITS if row.method == "rope" else row.method)


def full_rows() -> list[Cell]:
    """With all that can be added to a rotation; how near heads look is searched like the rest."""
    return [_with(Cell(m), VALUES_TOO, name=_full_name(m)) for m in TAKE_MORE]


def tuned(row: Cell, preset: Preset) -> Cell:
    """With the fields that a search at this scale found, if there was one."""
    own = _found(row_key(row), preset)
    if not own and VALUES_TOO.items() <= dict(row.fields).items():
        own = _near(row.method)
    return _with(row, {**_found(EVERY, preset), **own})


def _found(key: str, preset: Preset) -> dict[str, Any]:
    return packaged("fair/tuned.yaml").get(preset.recipe, {}).get(key) or {}


def _with(row: Cell, fields: Mapping[str, Any], **changes: Any) -> Cell:
    return replace(row, fields=tuple({**dict(row.fields), **fields}.items()), **changes)


def _near(method: str) -> dict[str, Any]:
    """How heads that start near do, where that is not searched. Learned angles start as vanilla
    RoPE then, and learn faster: which trials with torus had suggested."""
    learned = {"model.init": "rope", "optim.angle_lr_scale": 10.0} if method != "rope" else {}
    return {"model.locality_bias": 4.0, "model.base": 100.0, **learned}


def _short(method: str) -> str:
    return LABELS[method].split(" (")[0]


def _full_name(method: str) -> str:
    return f"{_short(method)}, values and near"


def _around(row: Cell, recipe: Config) -> list[Cell]:
    """The row, and copies with one thing changed: those that differ from it."""
    scale = row.config(recipe, 0).optim.angle_lr_scale
    changes: dict[str, dict[str, Any]] = {
        "class token unrotated": {"model.class_position": "unrotated"},
        **STARTS,
        "noise shared by the batch": {"train.perturbation_per": "batch"},
        "noise of its own for each image": {"train.perturbation_per": "sample"},
        "angles learn at a tenth of the rate": {"optim.angle_lr_scale": scale * 0.1},
        "angles learn at ten times the rate": {"optim.angle_lr_scale": scale * 10},
        "angles decay": {"optim.angle_weight_decay": 0.05},
        "coordinates rescaled, up to twofold": {"train.rescale": 2.0},
        "absolute positions besides": {"model.ape": True},
        "values too": {"model.rotate_values": True},
        "heads start near": {"model.locality_bias": 4.0},
    }
    if row.method == "comrope-torus":
        changes["basis learns at a tenth of the rate"] = {"optim.basis_lr_scale": 0.1}
        changes["basis fixed"] = {"optim.basis_lr_scale": 0.0}
    name = _short(row.method)
    changed = [_with(row, fields, name=f"{name}, {what}") for what, fields in changes.items()]
    silent = replace(row, perturbation=0.0, name=f"{name}, no noise")
    own = row.config(recipe, 0)
    return [row, *(cell for cell in (*changed, silent) if cell.config(recipe, 0) != own)]
