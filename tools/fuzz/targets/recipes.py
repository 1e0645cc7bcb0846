"""Recipes: YAML files with the fields of a run."""

from __future__ import annotations

import math
import random
from typing import Any

import yaml

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import (
    Config,
    load_recipe,
    recipe_names,
    run_id,
    run_name,
    to_dict,
    to_yaml,
)
from comrope.experiments.tasks import task_of
from fuzz import trees
from fuzz.judge import Finding, require
from fuzz.target import Target, mutate_text

__all__ = ["Fuzz", "check_config"]

ABOUT = ("base", "parent", "schema")  # what a recipe contains besides fields
UPGRADED = (  # fields and values of earlier versions
    "near", "rope_units", "turned", "scattered", "angle_weight_decay", "basis_lr_scale", "rescale",
)  # fmt: skip
EXTRA = (
    "base: digits\ntrain: {seed: 3, epochs: 2}\nmodel: {position: comrope-ap, init: turned}\n",
    "schema: 3\nbase: imagenet_comrope-ld_p1\noptim: &a {lr: 1e-3}\noptions: {x: 1, y: no}\n",
    "base: digits\ntrain: &a {seed: 1}\nevaluate: {<<: *a, resolutions: [12, 24]}\n",
    'base: scenes\ndetect: {anchors: [8, 16, 32], jitter: [0.5, 1.0]}\naugment: {scale: "1,1"}\n',
)


class Fuzz(Target):
    suffix = ".yaml"
    errors = (UserError,)

    def seeds(self) -> list[bytes]:
        plain = [to_yaml(load_recipe(name)) for name in ("digits", "ucf101", "bccd")]
        return [text.encode() for text in (*plain, *EXTRA[:2], EXTRA[3])]

    def examine(self, data: bytes) -> bool:
        file = self.folder / "fuzz.yaml"
        file.write_bytes(data)
        with self.watched():
            answer = self.ask(lambda: load_recipe(file), file, "recipe")
            if not answer.accepted:
                return False
            config: Config = answer.value
            check_config(config)
            again = self.folder / "again.yaml"
            again.write_text(to_yaml(config), encoding="utf-8")
            require(load_recipe(again) == config, "a recipe changes when it is written")
            self.ask(lambda: task_of(config), *_fields(config))
        _check_silent(data, config)
        return True

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            base = rng.choice(recipe_names())
            return trees.dump(trees.Pairs([("base", base)])).encode()
        return mutate_text(data, rng, yaml=True)


def check_config(config: Config) -> None:
    """Require that a configuration has an identity and finite numbers."""
    for number in _numbers(to_dict(config)):
        require(math.isfinite(number), "silent: a number that is not finite")
    require(run_name(config).endswith(run_id(config)), "another identity")


def _fields(config: Config) -> list[str]:
    """Return the names of the sections and fields, one of which a message must contain."""
    return [f"{name}." for name in to_dict(config)] + ["task", "options"]


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in _numbers(each)]
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, float) else []


def _check_silent(data: bytes, config: Config) -> None:
    """Require that no name appears twice, and that every value of a recipe is used."""
    try:
        node = yaml.compose(data.decode("utf-8-sig"), yaml.SafeLoader)
        tree = yaml.safe_load(data.decode("utf-8-sig")) or {}
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise Finding("silent: accepts what is no YAML", str(error)) from None
    if node is not None:
        _check_names(node, set())
    if any(word in data.decode() for word in UPGRADED):
        return
    used = to_dict(config)
    for section, fields in tree.items():
        if section in ABOUT:
            continue
        for name, value in fields.items() if isinstance(fields, dict) else [("", fields)]:
            own = used[section][name] if isinstance(fields, dict) else used[section]
            require(_same(own, value), "silent: another value", f"{section}.{name} {own!r}")


def _check_names(node: Any, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        require(len(names) == len(set(names)), "silent: a name appears twice")
        for _, value in node.value:
            _check_names(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_names(value, seen)


def _same(own: Any, value: Any) -> bool:
    """Return whether a field has a value of a recipe, in its own type."""
    if isinstance(own, (list, tuple)):
        if isinstance(value, str):
            value = yaml.safe_load(f"[{value}]")
        values = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        return len(own) == len(values) and all(map(_same, own, values))
    if isinstance(own, dict) and isinstance(value, dict):
        return {str(n): v for n, v in value.items()} == own
    if isinstance(own, str) and isinstance(value, bool):
        return own == ("yes" if value else "no")
    if isinstance(own, float) and isinstance(value, (str, int)):
        return own == float(value)
    return bool(own == value) and type(own) is type(value)
