"""A run is a complete, typed configuration: fields, recipes, overrides, identity."""

from __future__ import annotations

from comrope.experiments.config.build import option_fields, to_dict
from comrope.experiments.config.config import Config, read_numbers
from comrope.experiments.config.identity import (
    CONFIG,
    RUNTIME,
    decisive,
    differences,
    non_default,
    read_config,
    run_id,
    run_name,
    runtime,
    start_id,
)
from comrope.experiments.config.methods import (
    commutes,
    method_fields,
    method_names,
    starts_at_zero,
)
from comrope.experiments.config.recipes import describe_fields, load_recipe, recipe_names, to_yaml
from comrope.experiments.config.schema import (
    TIMM,
    Augment,
    Data,
    Detect,
    Evaluate,
    Language,
    Model,
    Optim,
    Train,
)
from comrope.experiments.config.upgrades import SCHEMA, upgrade

__all__ = [
    "CONFIG",
    "RUNTIME",
    "SCHEMA",
    "TIMM",
    "Augment",
    "Config",
    "Data",
    "Detect",
    "Evaluate",
    "Language",
    "Model",
    "Optim",
    "Train",
    "commutes",
    "decisive",
    "describe_fields",
    "differences",
    "load_recipe",
    "method_fields",
    "method_names",
    "non_default",
    "option_fields",
    "read_config",
    "read_numbers",
    "recipe_names",
    "run_id",
    "run_name",
    "runtime",
    "start_id",
    "starts_at_zero",
    "to_dict",
    "to_yaml",
    "upgrade",
]
