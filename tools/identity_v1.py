"""The first identity of a run: the folder name that its configuration had, frozen.

Committed results were filed under these names. The package may name fields and runs in another way;
this file does not change, and imports nothing but the standard library. ``to_v1`` brings a present
configuration back to the first names, so that both can be compared.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RENAMED_FIELDS", "RENAMED_VALUES", "canonical", "digest", "run_name", "to_v1"]

Tree = dict[str, Any]

# First name -> present name. A name that is not used yet does no harm.
RENAMED_FIELDS = {
    "model.near": "model.locality_bias",
    "model.rope_units": "model.position_units",
}
RENAMED_VALUES = {
    "model.init": {"turned": "rope-random-axes", "scattered": "isotropic"},
}

# Every field in its order, with its default.
FIELDS: dict[str, dict[str, Any]] = {
    "model": {
        "name": "vit_base_patch16_224",
        "position": "comrope-ld",
        "ape": False,
        "rotate_values": False,
        "near": 0.0,
        "block_size": 8,
        "init": "normal",
        "rope_units": "patch",
        "spread": 1.0,
        "base": None,
        "tubelet": 1,
        "axis_scale": [],
        "class_token": True,
        "class_position": "center",
        "global_pool": "token",
        "drop_path_rate": 0.0,
        "layer_scale": None,
    },
    "data": {
        "name": "folder",
        "root": None,
        "train_split": "train",
        "val_split": "validation",
        "holdout": 0.0,
        "num_classes": 1000,
        "in_chans": 3,
        "frames": 0,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "unreadable": "stop",
        "cache": False,
        "workers": 8,
    },
    "augment": {
        "scale": [0.08, 1.0],
        "ratio": [0.75, 1.3333333333333333],
        "hflip": 0.5,
        "color_jitter": 0.0,
        "auto_augment": None,
        "erase": 0.0,
        "mixup": 0.0,
        "cutmix": 0.0,
        "smoothing": 0.0,
        "repeats": 1,
        "interpolation": "bilinear",
        "frames": "random",
        "crop_pct": 0.875,
    },
    "optim": {
        "name": "adamw",
        "lr": 0.001,
        "angle_lr_scale": 1.0,
        "basis_lr_scale": 1.0,
        "angle_weight_decay": 0.0,
        "layer_decay": 1.0,
        "weight_decay": 0.01,
        "betas": [0.9, 0.999],
        "schedule": "cosine",
        "warmup_ratio": 0.02,
        "min_lr": 0.0,
        "clip_grad": None,
    },
    "train": {
        "start_from": None,
        "epochs": 200,
        "batch_size": 6144,
        "accumulate": 1,
        "seed": 0,
        "perturbation": 1.0,
        "perturbation_per": "sample",
        "perturbation_axes": [],
        "rescale": 1.0,
        "precision": "no",
        "compile": False,
        "ema": None,
        "strategy": "ddp",
        "device": "auto",
        "checkpoint_every": 500,
        "keep": 2,
        "log_every": 20,
    },
    "evaluate": {
        "resolutions": [112, 128, 192, 224, 256, 320, 384, 448, 512],
        "frames": [],
        "spans": [],
        "batch_size": 512,
        "every": 10,
    },
    "detect": {
        "kind": "mask",
        "image_size": 1024,
        "window": 14,
        "scale": "relative",
        "anchors": [32, 64, 128, 256, 512],
        "finest_stride": None,
        "graph": False,
        "out_channels": 256,
        "head_channels": 1024,
        "proposals": 1000,
        "samples": 512,
        "jitter": [0.1, 2.0],
    },
}

# Fields that do not decide what is learned.
RUNTIME = {
    "data.root", "data.unreadable", "data.workers", "data.cache", "train.accumulate",
    "train.checkpoint_every", "train.compile", "train.device", "train.keep", "train.log_every",
    "train.strategy", "detect.graph", "evaluate.batch_size", "evaluate.every", "evaluate.frames",
    "evaluate.resolutions", "evaluate.spans",
}  # fmt: skip
# Fields that were added later: at their default they are not part of the name.
LATER = (
    "model.ape", "model.rotate_values", "model.near", "model.spread", "model.tubelet",
    "model.axis_scale", "data.frames", "data.holdout", "augment.frames", "train.start_from",
    "train.perturbation_axes", "train.rescale", "optim.basis_lr_scale", "optim.angle_weight_decay",
    "optim.layer_decay", "detect.",
)  # fmt: skip


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def to_v1(config: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> Tree:
    """Return a configuration with the first names of fields and values, complete.

    Args:
        config: Sections with fields, as ``config.yaml`` has them; missing fields get their default.
        aliases: Names of runs that ``train.start_from`` may hold -> their first names.

    Raises:
        ValueError: A field is unknown to the first identity and not empty.
    """
    found = copy.deepcopy(FIELDS)
    fields = {new: old for old, new in RENAMED_FIELDS.items()}
    for section, keys in config.items():
        if not isinstance(keys, Mapping):  # a later field beside the sections
            if keys:
                raise ValueError(f"{section}: expected a field of the first identity, got {keys!r}")
            continue
        for key, value in keys.items():
            name = fields.get(f"{section}.{key}", f"{section}.{key}")
            values = {new: old for old, new in RENAMED_VALUES.get(name, {}).items()}
            value = values.get(value, value) if isinstance(value, str) else value
            first, _, last = name.partition(".")
            if last in found.get(first, {}):
                value = list(value) if isinstance(value, tuple) else value
                if value != found[first][last]:  # 32 and 32.0 are the same default
                    found[first][last] = value
            elif value:
                raise ValueError(f"{name}: expected a field of the first identity, got {value!r}")
    start = found["train"]["start_from"]
    if start and aliases:
        path = Path(start)
        found["train"]["start_from"] = str(path.with_name(aliases.get(path.name, path.name)))
    return found


def run_name(config: Mapping[str, Any]) -> str:
    """Return the folder name of a complete configuration with the first names of fields."""
    usual = _decisive(FIELDS)
    fields = [
        (name, value)
        for name, value in _decisive(config).items()
        if not name.startswith(LATER) or (value or None) != (usual[name] or None)
    ]
    text = hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:8]
    model, train = config["model"], config["train"]
    noise, seed = train["perturbation"], train["seed"]
    return f"{model['position']}-b{model['block_size']}-p{noise:g}-s{seed}-{text}"


def _decisive(config: Mapping[str, Any]) -> Tree:
    found = {
        f"{section}.{key}": config[section][key]
        for section, keys in FIELDS.items()
        for key in keys
        if f"{section}.{key}" not in RUNTIME
    }
    if found["train.start_from"]:  # a run is known by its name: folders are moved
        found["train.start_from"] = Path(os.path.abspath(found["train.start_from"])).name
    return found
