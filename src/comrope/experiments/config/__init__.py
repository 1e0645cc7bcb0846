"""A run is a complete, typed configuration: recipes, fields, overrides, checks."""

from __future__ import annotations

from comrope.experiments.config.sanity import TIMM
from comrope.experiments.config.schema import (
    RUNTIME,
    Augment,
    Config,
    Data,
    Detect,
    Evaluate,
    Model,
    Optim,
    Train,
    decisive,
    differences,
    load_recipe,
    recipe_names,
    runtime,
    to_dict,
    to_yaml,
)

__all__ = [
    "RUNTIME",
    "TIMM",
    "Augment",
    "Config",
    "Data",
    "Detect",
    "Evaluate",
    "Model",
    "Optim",
    "Train",
    "decisive",
    "differences",
    "load_recipe",
    "recipe_names",
    "runtime",
    "to_dict",
    "to_yaml",
]
