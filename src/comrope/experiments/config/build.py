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

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import name_shown, shown
from comrope.experiments.config import reader
from comrope.experiments.config.bounds import LONGEST_LIST, Bounds, expected

__all__ = [
    "Scalar",
    "Text",
    "build",
    "checked",
    "field_types",
    "flat",
    "option",
    "option_fields",
    "suggest",
    "to_dict",
    "to_plain",
]

Scalar = bool | int | float | str
OF_OPTIONS = Bounds(minimum=-1e300, maximum=1e300)


def option(
    default: Any,
    *,
    help: str,  # noqa: A002
    runtime: bool = False,
    **bounds: Any,
) -> Any:
    """Declare a field of a section.

    Args:
        default: The value of the field where a recipe gives none.
        help: What the field means, in one sentence, with its unit.
        runtime: Whether the field does not change what is learned. Such a field is not part of a
            run's identity, and a run may be resumed with another value.
        bounds: The accepted values, as in ``Bounds``.
    """
    about = {"help": help, "runtime": runtime, "bounds": Bounds(**bounds)}
    return dataclasses.field(default=default, metadata=about)


class Text(str):
    """A value typed on a command line: YAML, unless the field is a text."""

    def read(self) -> Any:
        try:
            return reader.parse(str(self))
        except ValueError:
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
        raise UserError(f"{where.removesuffix('.')}: expected fields, got {shown(tree)}")
    types_of = _types_of(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for name, value in tree.items():
        if name not in types_of:
            raise UserError(
                f"{where}{name_shown(name)}: no such field{suggest(str(name), types_of)}"
            )
        bounds = fields[name].metadata.get("bounds", Bounds())
        values[name] = checked(types_of[name], bounds, value, f"{where}{name}")
    return kind(**values)


def checked(kind: Any, bounds: Bounds, value: Any, where: str) -> Any:
    """Return a value as its type; raise unless it has this type and is within bounds.

    Args:
        kind: The type of a field.
        bounds: The accepted values.
        value: A plain value, or a ``Text``.
        where: The name of the field in messages.
    """
    if dataclasses.is_dataclass(kind):
        return build(kind, value, f"{where}.")
    if typing.get_origin(kind) is dict:
        return _scalars(value, where)
    try:
        found = _typed(kind, bounds, value)
        if bounds.accepts(found):
            return found
    except (TypeError, ValueError, OverflowError):  # another type; an integer too large for a float
        pass
    raise UserError(f"{where}: expected {expected(kind, bounds)}, got {shown(value)}")


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _typed(kind: Any, bounds: Bounds, value: Any) -> Any:
    """Return a value as its type; raise ``TypeError`` or ``ValueError`` for other values."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if isinstance(value, Text):
        empty = types.NoneType in options and value in ("null", "~", "")
        value = None if empty else str(value) if str in options else value.read()
    if value is None and types.NoneType in options:
        return None
    (kind,) = (option for option in options if option is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        element, *rest = typing.get_args(kind)
        if isinstance(value, str):  # "64,128", as typed on a command line
            value = Text(f"[{value}]").read()
        value = [] if value is None else value
        value = [value] if not isinstance(value, (list, tuple)) else value
        most = (bounds.longest or LONGEST_LIST) if rest == [Ellipsis] else 1 + len(rest)
        if len(value) > most or (rest != [Ellipsis] and len(value) < most):
            raise ValueError
        return tuple(_typed(element, bounds, item) for item in value)
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        return float(value)  # YAML reads 1e-3 as text
    if kind is str and isinstance(value, bool):
        return "no" if value is False else "yes"  # YAML reads "no" as false
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise TypeError


def _scalars(value: Any, where: str) -> dict[str, Scalar]:
    """Return names with one plain value each; any names are accepted."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected names with values, got {shown(value)}")
    found = {}
    for name, item in value.items():
        plain = item.read() if isinstance(item, Text) else item
        if isinstance(item, Text) and isinstance(plain, str):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as text
                plain = number if math.isfinite(number := float(plain)) else plain
        if not isinstance(plain, Scalar) or not OF_OPTIONS.accepts(plain):
            raise UserError(
                f"{where}.{name_shown(name)}: expected a text, a finite number or a bool, got "
                f"{shown(plain)}"
            )
        found[str(name)] = plain
    return found


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
    return {name: field for name, (field, _) in _options(kind).items()}


def field_types(kind: Any) -> dict[str, Any]:
    """Return the types of the fields declared with ``option``, by name."""
    return {name: type_ for name, (_, type_) in _options(kind).items()}


def _options(kind: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for field in dataclasses.fields(kind):
        type_ = _types_of(kind)[field.name]
        if dataclasses.is_dataclass(type_):
            found |= {f"{field.name}.{key}": each for key, each in _options(type_).items()}
        elif field.metadata:
            found[field.name] = field, type_
    return found


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar choice; empty if none is similar."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean {close[0]}?" if close else ""
