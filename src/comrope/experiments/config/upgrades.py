"""Configurations of earlier versions: renamed and removed fields and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import name_shown, shown
from comrope.experiments.config.build import Text

__all__ = ["SCHEMA", "upgrade", "upgrade_tree"]

SCHEMA = 3  # version of the fields; written to every run's config.yaml


class Upgrade(NamedTuple):
    """The changes from one schema to the next."""

    renamed: Mapping[str, str]  # field -> its next name
    values: Mapping[str, Mapping[str, str]]  # next name of a field -> value -> its next name
    removed: Mapping[str, Any]  # field -> its default, the only value that can be dropped


UPGRADES = {
    1: Upgrade(
        renamed={
            "model.near": "model.locality_bias",
            "model.rope_units": "model.position_units",
        },
        values={"model.init": {"turned": "rope-random-axes", "scattered": "isotropic"}},
        removed={},
    ),
    2: Upgrade(
        renamed={},
        values={},
        removed={
            "optim.angle_weight_decay": 0.0,
            "optim.basis_lr_scale": 1.0,
            "train.rescale": 1.0,
        },
    ),
}


def upgrade(
    fields: Mapping[str, Any], schema: int = 1, where: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Convert fields of an earlier schema to the present one.

    Args:
        fields: Values by dotted name.
        schema: The schema of ``fields``.
        where: Text before a field's name in messages.

    Returns:
        The values by their present names, and a sentence for every change.

    Raises:
        UserError: The schema is newer than this version, or a removed field differs from its
            default.
    """
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise UserError(
            f"{where}schema: expected 1 to {SCHEMA}, got {shown(schema)}; perhaps a later version "
            "wrote it"
        )
    found, changes = dict(fields), []
    for number in range(schema, SCHEMA):
        found, some = _step(found, UPGRADES[number], where)
        changes += some
    return found, changes


def upgrade_tree(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Convert the sections of a file to the present schema; "schema" in the file gives its own."""
    tree = dict(tree)
    schema = tree.pop("schema", 1)
    if dotted := [name for name in tree if "." in name]:
        raise UserError(
            f"{where}{name_shown(dotted[0])}: expected a section with fields, such as train: "
            "{epochs: 3}"
        )
    sections = {name: value for name, value in tree.items() if isinstance(value, dict)}
    fields = {f"{name}.{key}": v for name, some in sections.items() for key, v in some.items()}
    found: dict[str, Any] = {name: {} if name in sections else v for name, v in tree.items()}
    for name, value in upgrade(fields, schema, where)[0].items():
        section, _, key = name.partition(".")
        found[section][key] = value
    return found


def _step(fields: dict[str, Any], step: Upgrade, where: str) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    changes = []
    for name, value in fields.items():
        if name in step.removed:
            if not _is(value, step.removed[name]):
                raise UserError(
                    f"{where}{name}: was removed; expected {step.removed[name]!r}, got "
                    f"{shown(value)}"
                )
            changes.append(f"{name}: was removed; leave it out")
            continue
        present = step.renamed.get(name, name)
        if present != name:
            changes.append(f"{name}: is called {present} now")
        values = step.values.get(present, {})
        if isinstance(value, str) and value in values:
            changes.append(f"{present}={value}: is called {values[value]} now")
            value = values[value]
        found[present] = value
    return found, changes


def _is(value: Any, default: Any) -> bool:
    plain = value.read() if isinstance(value, Text) else value
    return bool(plain == default)
