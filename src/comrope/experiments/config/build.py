"""Dataclasses from plain values and back, every value of the type that its field has."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

import yaml

from comrope.experiments.common.errors import UserError

__all__ = ["Scalar", "Text", "build", "flat", "suggest", "to_dict"]

Scalar = bool | int | float | str


class Text(str):
    """A value as it was typed: YAML, unless the field is a text."""

    def read(self) -> Any:
        try:
            return yaml.safe_load(self)
        except yaml.YAMLError:
            return str(self)


def build(kind: Any, tree: Any, where: str) -> Any:
    """A dataclass from plain values, every one of them of the type that its field has."""
    if not isinstance(tree, dict):
        raise UserError(f"{where}expected fields, got {tree!r}")
    known = typing.get_type_hints(kind)
    for name in tree:
        if name not in known:
            raise UserError(f"{where}{name}: no such field{suggest(str(name), known)}")
    return kind(**{name: _typed(known[name], v, f"{where}{name}") for name, v in tree.items()})


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
        return _options(value, where)
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
        return "no" if value is False else "yes"  # and "no" as false
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise UserError(f"{where}: expected {kind.__name__}, got {value!r}")


def _options(value: Any, where: str) -> dict[str, Scalar]:
    """Names of any kind, each with one plain value."""
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


def to_dict(config: Any) -> dict[str, Any]:
    """Sections and fields as plain YAML values."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def flat(config: Any) -> dict[str, Any]:
    """Fields by dotted name, those outside of any section by their own: plain YAML values."""
    found: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
