"""Convert plain values to dataclasses and back; check the type and the bounds of every value."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

import yaml

from comrope.experiments.common.errors import UserError

__all__ = [
    "Scalar",
    "Text",
    "build",
    "flat",
    "option",
    "option_fields",
    "suggest",
    "to_dict",
    "to_plain",
]

Scalar = bool | int | float | str


def option(
    default: Any,
    *,
    help: str,  # noqa: A002
    choices: tuple[str, ...] = (),
    minimum: float = 0,
    above: float | None = None,
    maximum: float | None = None,
    runtime: bool = False,
) -> Any:
    """Declare a field of a section.

    Args:
        default: The value of the field where a recipe gives none.
        help: What the field means, in one sentence, with its unit.
        choices: The accepted texts; by default any.
        minimum: The smallest accepted number. Numbers must be finite.
        above: A number that the value must exceed, instead of ``minimum``.
        maximum: The largest accepted number; by default any.
        runtime: Whether the field does not change what is learned. Such a field is not part of a
            run's identity, and a run may be resumed with another value.
    """
    about = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "runtime": runtime,
    }
    return dataclasses.field(default=default, metadata=about)


class Text(str):
    """A value typed on a command line: YAML, unless the field is a text."""

    def read(self) -> Any:
        try:
            return yaml.safe_load(str(self))
        except yaml.YAMLError:
            return str(self)


def build(kind: Any, tree: Any, where: str) -> Any:
    """Build a dataclass from plain values.

    Args:
        kind: The dataclass. Its fields may be dataclasses themselves.
        tree: Values by name.
        where: Text before a field's name in messages.

    Raises:
        UserError: A field is unknown, or a value has another type or is out of bounds.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{where}expected fields, got {tree!r}")
    types_of = _types_of(kind)
    about = {field.name: field.metadata for field in dataclasses.fields(kind)}
    values = {}
    for name, value in tree.items():
        if name not in types_of:
            raise UserError(f"{where}{name}: no such field{suggest(str(name), types_of)}")
        values[name] = _typed(types_of[name], value, f"{where}{name}")
        _check(values[name], about[name], f"{where}{name}")
    return kind(**values)


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _typed(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(kind, value, f"{where}.")
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if isinstance(value, Text):
        empty = types.NoneType in options and value in ("null", "~", "")
        value = None if empty else str(value) if str in options else value.read()
    if value is None and types.NoneType in options:
        return None
    (kind,) = (option for option in options if option is not types.NoneType)
    if typing.get_origin(kind) is dict:
        return _scalars(value, where)
    if typing.get_origin(kind) is tuple:
        element, *rest = typing.get_args(kind)
        if isinstance(value, str):  # "64,128", as typed on a command line
            value = Text(f"[{value}]").read()
        value = [] if value is None else value
        value = [value] if not isinstance(value, (list, tuple)) else value
        if rest != [Ellipsis] and len(value) != 1 + len(rest):
            raise UserError(f"{where}: expected {1 + len(rest)} values, got {value!r}")
        return tuple(_typed(element, item, where) for item in value)
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            pass
    elif kind is str and isinstance(value, bool):
        return "no" if value is False else "yes"  # YAML reads "no" as false
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise UserError(f"{where}: expected {kind.__name__}, got {value!r}")


def _scalars(value: Any, where: str) -> dict[str, Scalar]:
    """Return names with one plain value each; any names are accepted."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected names with values, got {value!r}")
    found = {}
    for name, item in value.items():
        plain = item.read() if isinstance(item, Text) else item
        if isinstance(item, Text) and isinstance(plain, str):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as text
                plain = number if math.isfinite(number := float(plain)) else plain
        if not isinstance(plain, Scalar):
            raise UserError(f"{where}.{name}: expected a text, a number or a bool, got {plain!r}")
        found[str(name)] = plain
    return found


def _check(value: Any, about: typing.Mapping[str, Any], where: str) -> None:
    """Raise unless a value is one of its field's choices, or within its field's bounds."""
    if not about:
        return
    choices = about["choices"]
    if choices and value not in choices:
        raise UserError(f"{where}: expected one of {', '.join(choices)}, got {value!r}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least, above, most = about["minimum"], about["above"], about["maximum"]
        high_enough = value >= least if above is None else value > above
        if not (math.isfinite(value) and high_enough and (most is None or value <= most)):
            low = f"at least {least:g}" if above is None else f"above {above:g}"
            high = "" if most is None else f" and at most {most:g}"
            raise UserError(f"{where}: expected a number {low}{high}, got {value!r}")


def to_dict(config: Any) -> dict[str, Any]:
    """Return sections and fields as plain YAML values."""
    return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def to_plain(value: Any) -> Any:
    """Return one plain YAML value: a list for a tuple, a dict for a section."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def flat(config: Any) -> dict[str, Any]:
    """Return fields as plain YAML values by dotted name; without a section, by their own name."""
    found: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def option_fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields declared with ``option``, of a dataclass and its sections, by name."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(section := _types_of(kind)[field.name]):
            found |= {f"{field.name}.{key}": each for key, each in option_fields(section).items()}
        elif field.metadata:
            found[field.name] = field
    return found


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar choice; empty if none is similar."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean {close[0]}?" if close else ""
