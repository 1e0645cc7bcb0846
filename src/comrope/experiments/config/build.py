"""Dataclasses from plain values and back, every value of the type that its field has."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any

import yaml

from comrope.experiments.common.errors import UserError

__all__ = ["Text", "build", "suggest", "to_dict"]


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


def to_dict(config: Any) -> dict[str, Any]:
    """Sections and fields as plain YAML values."""
    return {
        f.name: to_dict(value)
        if dataclasses.is_dataclass(value := getattr(config, f.name))
        else list(value)
        if isinstance(value, tuple)
        else value
        for f in dataclasses.fields(config)
    }


def suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
