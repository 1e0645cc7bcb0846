"""A run is a complete, typed configuration: read from a recipe file, overridden, checked, saved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from comrope.experiments.common.errors import UserError
from comrope.experiments.config.build import Scalar, Text, build, flat, suggest, to_dict
from comrope.experiments.config.sanity import TIMM, checked

__all__ = [
    "TIMM",
    "Config",
    "decisive",
    "differences",
    "load_recipe",
    "recipe_names",
    "runtime",
    "to_dict",
    "to_yaml",
]

Pair = tuple[float, float]
BOXED = ("coco", "scenes")  # data with boxes


@dataclass(frozen=True)
class Model:
    name: str = "vit_base_patch16_224"  # size, patch and training resolution; or "timm:..."
    position: str = "comrope-ld"
    ape: bool = False  # absolute positions beside the rotation
    rotate_values: bool = False  # besides queries and keys
    near: float = 0.0  # heads that look near at the start, by so high a score
    block_size: int = 8
    init: str = "normal"
    rope_units: str = "patch"
    spread: float = 1.0  # of the start "normal", wider or narrower
    base: float | None = None
    tubelet: int = 1  # frames of a patch, of clips
    axis_scale: tuple[float, ...] = ()  # of the coordinates, one number an axis; 0: no such axis
    class_token: bool = True
    class_position: str = "center"
    global_pool: str = "token"
    drop_path_rate: float = 0.0
    layer_scale: float | None = None


@dataclass(frozen=True)
class Data:
    # "digits", "folder", "shards", or what timm calls it: "hfds/..."; of clips "ucf101", "moving";
    # with boxes "coco", "scenes"
    name: str = "folder"
    root: str | None = None
    train_split: str = "train"
    val_split: str = "validation"
    holdout: float = 0.0  # share of the training images that validates, in place of val_split
    num_classes: int = 1000
    in_chans: int = 3
    frames: int = 0  # of a clip; 0 for images
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    unreadable: str = "stop"  # or "skip": named, counted, and the next image takes its place
    cache: bool = False  # decode once, keep in memory
    workers: int = 8  # loading processes for each training process


@dataclass(frozen=True)
class Augment:
    scale: Pair = (0.08, 1.0)  # of the random crop, in area
    ratio: Pair = (0.75, 1.3333333333333333)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0
    repeats: int = 1  # DeiT's repeated augmentation
    interpolation: str = "bilinear"
    frames: str = "random"  # or "uniform": which of its part of a video a clip takes in training
    crop_pct: float = 0.875  # of evaluation


@dataclass(frozen=True)
class Optim:
    name: str = "adamw"
    lr: float = 1e-3
    angle_lr_scale: float = 1.0  # of the angles' learning rate to the others'
    basis_lr_scale: float = 1.0  # of that of comrope-torus's basis to the other angles'
    angle_weight_decay: float = 0.0
    layer_decay: float = 1.0  # of the learning rate, from each layer to the one before it
    weight_decay: float = 0.01
    betas: Pair = (0.9, 0.999)
    schedule: str = "cosine"
    warmup_ratio: float = 0.02
    min_lr: float = 0.0
    clip_grad: float | None = None


@dataclass(frozen=True)
class Train:
    start_from: str | None = None  # a finished run's folder, or "timm:..." for timm's weights
    epochs: int = 200
    batch_size: int = 6144  # of one optimizer step, over all processes and accumulated parts
    accumulate: int = 1
    seed: int = 0
    perturbation: float = 1.0  # the paper's sigma
    perturbation_per: str = "sample"  # or "batch": one draw for all
    perturbation_axes: tuple[int, ...] = ()  # by number; by default all
    rescale: float = 1.0  # coordinates by a factor of up to this, or down; drawn as the noise is
    precision: str = "no"  # or "bf16", "fp16"
    compile: bool = False
    ema: float | None = None  # decay of the averaged weights, which are then the ones evaluated
    strategy: str = "ddp"  # or "fsdp2"
    device: str = "auto"  # or "cpu"
    checkpoint_every: int = 500  # steps; at the end of training too
    keep: int = 2
    log_every: int = 20  # steps


@dataclass(frozen=True)
class Evaluate:
    resolutions: tuple[int, ...] = (112, 128, 192, 224, 256, 320, 384, 448, 512)
    frames: tuple[int, ...] = ()  # of clips, besides data.frames
    spans: tuple[float, ...] = ()  # how much of a video a clip is taken from, besides all of it
    batch_size: int = 512  # over all processes, at the training resolution
    every: int = 10  # epochs between evaluations at the training resolution; 0 for never


@dataclass(frozen=True)
class Detect:
    """Of data with boxes: what is built around the ViT, and how it is shown images."""

    kind: str = "mask"  # Mask R-CNN; or "box", Faster R-CNN
    image_size: int = 1024  # of the square that images are fitted into, and padded to
    window: int = 14  # patches along a side
    scale: str = "relative"  # or "patch": what coordinates count
    anchors: tuple[float, ...] = (32, 64, 128, 256, 512)  # in pixels, one a level of the pyramid
    finest_stride: int | None = None  # pixels, of the finest level; by default a quarter of a patch
    graph: bool = False  # replay the backbone as a CUDA graph, where one GPU trains batches whole
    out_channels: int = 256  # of every level
    head_channels: int = 1024  # of the box head
    proposals: int = 1000  # an image; twice as many in training
    samples: int = 512  # proposals that the heads learn from, an image
    jitter: Pair = (0.1, 2.0)  # large-scale jitter: of the size that fits


@dataclass(frozen=True)
class Config:
    task: str = ""  # a name of TASKS, or "package.module:Class"; by default as data.name implies
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)
    detect: Detect = field(default_factory=Detect)
    # Of a task that is defined outside of comrope, which checks them itself.
    options: dict[str, Scalar] = field(default_factory=dict, hash=False)

    @property
    def detects(self) -> bool:
        """Whether boxes are learned, rather than classes of whole images or clips."""
        return self.data.name in BOXED

    @property
    def headline(self) -> str:
        """The figure of a result that is looked at first."""
        return "AP" if self.detects else "top1"

    def with_overrides(self, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
        """A copy with some fields set: "train.epochs=3" texts as typed on a command line, or a
        mapping from dotted names."""
        if not isinstance(overrides, Mapping):
            overrides = dict(_split(text) for text in overrides)
        tree, known = to_dict(self), flat(self)
        for name, value in overrides.items():
            section, _, key = name.partition(".")
            if section == "options" and key:
                tree[section][key] = value
            elif name not in known:
                raise UserError(f"{name}: no such field{suggest(name, known)}")
            elif key:
                tree[section][key] = value
            else:
                tree[name] = value
        return checked(build(Config, tree, ""))


# Fields that do not decide what is learned: a run may be resumed with others.
RUNTIME = {
    "data.root",
    "data.unreadable",
    "data.workers",
    "data.cache",
    "train.accumulate",
    "train.checkpoint_every",
    "train.compile",
    "train.device",
    "train.keep",
    "train.log_every",
    "train.strategy",
    "detect.graph",
    "evaluate.batch_size",
    "evaluate.every",
    "evaluate.frames",
    "evaluate.resolutions",
    "evaluate.spans",
}


def recipe_names() -> list[str]:
    """The recipes that come with comrope."""
    files = resources.files("comrope.experiments").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_recipe(name: str | Path) -> Config:
    """A recipe that comes with comrope, by name, or a file: .yaml, such as a run's config.yaml.

    A file may stand on another, ``base: NAME``, and state only what differs.
    """
    return checked(build(Config, _tree(str(name)), f"recipe {name}: "))


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def decisive(config: Config) -> dict[str, Any]:
    """The fields that decide what is learned, by dotted name."""
    found = {name: value for name, value in flat(config).items() if name not in RUNTIME}
    if config.train.start_from:  # a run is known by its name: folders are moved
        found["train.start_from"] = Path(os.path.abspath(config.train.start_from)).name
    return found


def runtime(config: Config) -> dict[str, Any]:
    """The fields that do not, by dotted name."""
    values = flat(config)
    return {name: values[name] for name in sorted(RUNTIME)}


def differences(mine: Config, theirs: Config) -> list[str]:
    """Fields that decide what is learned and differ, as "name: mine, theirs"."""
    a, b = decisive(mine), decisive(theirs)
    return [
        f"{name}: {a.get(name)!r}, there {b.get(name)!r}"
        for name in a | b
        if a.get(name) != b.get(name)
    ]


def _tree(name: str, depth: int = 0) -> dict[str, Any]:
    if depth > 10:
        raise UserError(f"recipe {name}: stands on itself")
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"recipe: no file {name}")
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {name}: cannot be read ({error})") from None
    else:
        file = resources.files("comrope.experiments").joinpath("recipes", f"{name}.yaml")
        if not file.is_file():
            raise UserError(f"recipe: no {name!r}{suggest(name, recipe_names())}; "
                            "`comrope recipes` lists them")  # fmt: skip
        text = file.read_text()
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserError(f"recipe {name}: not YAML ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {name}: expected sections with fields, got {tree!r}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if isinstance(base, str) and base.endswith((".yaml", ".yml")):
        base = str(Path(name).parent / base)
    merged = _tree(str(base), depth + 1)
    for section, fields in tree.items():
        if isinstance(fields, dict) and isinstance(merged.get(section), dict):
            merged[section] = {**merged[section], **fields}
        else:
            merged[section] = fields
    return merged


def _split(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UserError(f"{text}: expected a field and its value, such as train.epochs=3")
    return name.strip(), Text(value)
