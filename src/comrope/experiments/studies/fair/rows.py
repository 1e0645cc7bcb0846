"""The rows of the fair comparison: every method with the settings that a search found for it.

Every row has the same number of trials, evaluated on held-out training images. The validation set
is not used for any choice (see ``tuning``). Without a search at a scale, a row has the recipe's
settings.
"""

from __future__ import annotations

from typing import Any

from comrope.experiments.studies.study import Preset, Row, method_label, packaged
from comrope.methods import method_class

__all__ = [
    "CONTROL",
    "EVERY",
    "EXTENDABLE",
    "EXTENSIONS",
    "OURS",
    "PATCH_UNITS",
    "ROWS",
    "SEARCHED",
    "extended_fields",
    "extended_label",
    "extended_rows",
    "more_seeds",
    "row_id",
    "tuned",
    "tuned_for_all",
]

OURS = ("comrope-ap", "comrope-ld", "comrope-torus")
PATCH_UNITS = "vanilla RoPE, patch units"
ROWS = (
    Row("ape"),
    # The paper's [0, 1] coordinates, and the usual coordinates of RoPE.
    Row(
        "rope", fields=(("model.position_units", "relative"),), label="vanilla RoPE, relative units"
    ),
    Row("rope", fields=(("model.position_units", "patch"),), label=PATCH_UNITS),
    Row("rope-mixed"),
    Row("liere"),
    *map(Row, OURS),
)
CONTROL = Row("none", perturbation=0.0)  # a perturbation of coordinates would change nothing
# Extensions of any rotation: rotated values and locality-biased heads.
EXTENSIONS = ("model.rotate_values", "model.locality_bias")
EXTENDABLE = ("rope", "rope-mixed", "liere", OURS[-1])
# Learning rate and weight decay are searched with one row, and used for all rows.
SEARCHED, EVERY = "ape", "every row"


def more_seeds(preset: Preset) -> int:
    """Return the number of seeds: more at presets with short runs, for small differences."""
    return 5 if preset.name in ("tiny", "small") else preset.seeds


def row_id(row: Row) -> str:
    """Return the key of a row in search.yaml and tuned.yaml."""
    return row.label or (PATCH_UNITS if row.method == "rope" else row.method)


def extended_label(method: str) -> str:
    return f"{method_label(method, short=True)}, extended"


def extended_rows() -> list[Row]:
    """Return rows with rotated values; ``tuned`` adds the searched locality bias."""
    fields = (("model.rotate_values", True),)
    return [Row(m, fields=fields, label=extended_label(m)) for m in EXTENDABLE]


def tuned(row: Row, preset: Preset) -> Row:
    """Return a row with the fields that a search at this preset found, if there was one."""
    own = _found(row_id(row), preset)
    if not own and ("model.rotate_values", True) in row.fields:
        own = extended_fields(row.method)
    return row.with_fields({**tuned_for_all(preset), **own})


def tuned_for_all(preset: Preset) -> dict[str, Any]:
    """Return the fields that a search at this preset found for all rows."""
    return _found(EVERY, preset)


def _found(key: str, preset: Preset) -> dict[str, Any]:
    return packaged("fair/tuned.yaml").get(preset.recipe, {}).get(key) or {}


def extended_fields(method: str) -> dict[str, Any]:
    """Return the settings of locality-biased heads without a search.

    Learned angles start as vanilla RoPE with a higher learning rate, as in trials with
    comrope-torus.
    """
    fields: dict[str, Any] = {"model.locality_bias": 4.0, "model.base": 100.0}
    if method_class(method).learns:
        fields |= {"model.init": "rope", "optim.angle_lr_scale": 10.0}
    return fields
