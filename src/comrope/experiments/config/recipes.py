"""Recipes: configurations in YAML files, for any method. A recipe may be based on another one."""

from __future__ import annotations

import os
import re
import textwrap
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.messages import shown
from comrope.experiments.config import reader
from comrope.experiments.config.bounds import expected
from comrope.experiments.config.build import (
    field_types,
    option_fields,
    suggest,
    to_dict,
    to_plain,
)
from comrope.experiments.config.config import Config, build_config
from comrope.experiments.config.methods import method_fields, method_names
from comrope.experiments.config.upgrades import SCHEMA, upgrade_tree

__all__ = ["describe_fields", "load_recipe", "read_sections", "recipe_names", "to_yaml"]

FILES = resources.files("comrope.experiments.config").joinpath("recipes")
COMPOSED = re.compile(r"(?P<method>.+?)(_p(?P<perturbation>\d+(\.\d+)?))?")
SUFFIXES = (".yaml", ".yml")
DEEPEST = 10  # recipes in a chain of bases


def recipe_names() -> list[str]:
    """Return the names of comrope's recipes."""
    names = (file.name for file in FILES.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_recipe(
    name: str | Path, method: str | None = None, perturbation: float | None = None
) -> Config:
    """Load a configuration.

    Args:
        name: A recipe of comrope (``recipe_names()``), or a YAML file, such as a run's config.yaml.
            A file contains the fields that differ from the defaults, or from the recipe in
            ``base: NAME``. RECIPE_METHOD or RECIPE_METHOD_pPERTURBATION is short for the next two
            arguments, such as imagenet_comrope-ld_p1.
        method: The position encoding, instead of the recipe's.
        perturbation: Perturbation of the coordinates, instead of the recipe's.

    Raises:
        UserError: There is no such recipe or method, or the file cannot be read, or a field or
            value is invalid.
    """
    config = build_config(_tree(str(name)), f"recipe {name}: ")
    return _compose(config, method, perturbation)


def to_yaml(config: Config, parent: str | None = None) -> str:
    """Return the text of a configuration's file, with every field.

    Args:
        config: The configuration.
        parent: The identity of the initial weights, to be stored with it.
    """
    about = {"schema": SCHEMA} if parent is None else {"schema": SCHEMA, "parent": parent}
    return yaml.safe_dump({**about, **to_dict(config)}, sort_keys=False)


def describe_fields() -> str:
    """Return a text with every field: its default, its meaning, and its accepted values."""
    lines, types_of = [], field_types(Config)
    for name, field in option_fields(Config).items():
        about = field.metadata
        default = yaml.safe_dump(to_plain(field.default), default_flow_style=True)
        lines.append(f"{name} = {default.removesuffix(chr(10)).removesuffix(chr(10) + '...')}")
        accepted = expected(types_of[name], about["bounds"])
        plain = accepted.startswith("a text")  # as most others
        text = about["help"] + ("" if plain else f" Expects {accepted}.")
        if about["runtime"]:
            text += " Does not change what is learned."
        lines.append(textwrap.fill(text, 96, initial_indent="    ", subsequent_indent="    "))
    lines.append("options.NAME")
    lines.append("    A text, number or bool for a task that is defined outside of comrope.")
    return "\n".join(lines)


def _compose(config: Config, method: str | None, perturbation: float | None) -> Config:
    if method is None:
        return config.with_overrides(
            {} if perturbation is None else {"train.perturbation": perturbation}
        )
    finetuned = config.train.start_from is not None
    fields = method_fields(method, perturbation, finetuned)
    if not fields.get("train.perturbation", config.train.perturbation):
        fields.pop("train.perturbation_per", None)  # it has no effect without perturbation
    return config.with_overrides(fields)


def read_sections(name: str | Path) -> dict[str, Any]:
    """Return the content of a recipe or file, names with plain values; it may have a base.

    Raises:
        UserError: It cannot be read, or is no such file.
    """
    try:
        if str(name).endswith(SUFFIXES):
            tree = reader.read(Path(name))
        else:
            tree = reader.parse(FILES.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"recipe: expected a file, {name} does not exist") from None
    except OSError as error:
        raise UserError(f"recipe {name}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"recipe {name}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UserError(f"recipe {name}: expected sections with fields, got {shown(tree)}")
    return tree


def _tree(name: str, chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the sections of a recipe as plain values, merged into those of its base.

    Args:
        name: The recipe.
        chain: The recipes that are based on it.
    """
    if name in chain:
        raise UserError(f"recipe {name}: is based on itself; expected a base without a cycle")
    if len(chain) > DEEPEST:
        raise UserError(f"recipe {chain[0]}: expected at most {DEEPEST} bases, got more")
    if not name.endswith(SUFFIXES) and name not in recipe_names():
        return _composed_tree(name, chain)
    tree = upgrade_tree(read_sections(name), f"recipe {name}: ")
    tree.pop("parent", None)  # of a run; see identity.read_config
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"recipe {name}: base: expected a recipe, got {shown(base)}")
    if base.endswith(SUFFIXES):
        base = os.path.normpath(Path(name).parent / base)
    merged = _tree(base, (*chain, name))
    for section, fields in tree.items():
        if isinstance(fields, dict) and isinstance(merged.get(section), dict):
            merged[section] = {**merged[section], **fields}
        else:
            merged[section] = fields
    return merged


def _composed_tree(name: str, chain: tuple[str, ...]) -> dict[str, Any]:
    """Return the sections of RECIPE_METHOD or RECIPE_METHOD_pPERTURBATION."""
    bases = sorted((n for n in recipe_names() if name.startswith(f"{n}_")), key=len)
    for base in bases[-1:]:
        match = COMPOSED.fullmatch(name.removeprefix(f"{base}_"))
        if match and match["method"] in method_names():
            perturbation = match["perturbation"]
            number = None if perturbation is None else float(perturbation)
            config = build_config(_tree(base, (*chain, name)), f"recipe {base}: ")
            return to_dict(_compose(config, match["method"], number))
    composed = (f"{base}_{method}" for base in recipe_names() for method in method_names())
    raise UserError(
        f"recipe: no recipe {shown(name)}{suggest(name, [*recipe_names(), *composed])}; "
        "`comrope recipes` lists all"
    )
