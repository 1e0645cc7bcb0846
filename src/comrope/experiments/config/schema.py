"""The fields of a run: their meanings, defaults, and accepted values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from comrope.experiments.common.errors import UserError
from comrope.experiments.config.build import Scalar, Text, build, flat, option, suggest, to_dict
from comrope.experiments.config.upgrades import upgrade

__all__ = [
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
    "build_config",
]

TIMM = "timm:"  # prefix of names of timm's models and weights


@dataclass(frozen=True)
class Model:
    """The network, and how it encodes positions."""

    name: str = option(
        "vit_base_patch16_224",
        help="Size, patch size and training resolution, or timm:NAME for a model of timm. For "
        "text: gpt_SIZE, or hf:NAME for a causal model of transformers, by name or folder.",
    )
    position: str = option(
        "comrope-ld", help="The position encoding: a method of comrope.METHODS, ape or none."
    )
    ape: bool = option(False, help="Whether absolute positions are added to a rotation.")
    rotate_values: bool = option(
        False, help="Whether values are rotated, in addition to queries and keys."
    )
    share_rotations: str = option(
        "none",
        choices=("none", "heads", "layers", "both"),
        help="Parts of a GPT that share their rotations.",
    )
    attention_temperature: str = option(
        "constant",
        choices=("constant", "log"),
        help="Whether queries of a GPT grow with the logarithm of the number of visible tokens, "
        "beyond the training context.",
    )
    locality_bias: float = option(
        0.0,
        help="Initial attention score at distance zero, which decreases with the distance; 0 for "
        "none.",
    )
    block_size: int = option(8, help="Size b of the blocks of the rotation matrices.")
    init: str = option("normal", help="Initialization of the angles.")
    position_units: str = option(
        "patch", help="Unit of the coordinates of vanilla RoPE frequencies: patch or relative."
    )
    spread: float = option(
        1.0, help="Factor on the standard deviation of the initialization normal."
    )
    base: float | None = option(
        None, help="Base of vanilla RoPE frequencies; by default the method's."
    )
    rotated_share: float | None = option(
        None,
        maximum=1,
        help="Share of the planes that rotate in p-RoPE, the fastest; by default 1.",
    )
    shared_heads: bool = option(False, help="Whether all heads share the learned angles.")
    log_frequencies: bool = option(
        False, help="Whether the logarithms of frequencies are learned, instead of frequencies."
    )
    tubelet: int = option(1, minimum=1, help="Frames of one patch, for clips.")
    axis_scale: tuple[float, ...] = option(
        (), help="Factor on the coordinates, one number per axis; 0 removes the axis."
    )
    class_token: bool = option(True, help="Whether there is a class token.")
    class_position: str = option("center", help="Coordinates of the class token.")
    global_pool: str = option("token", help="Input of the head: token, or avg for the mean.")
    drop_path_rate: float = option(0.0, help="Rate of stochastic depth in the last layer.")
    layer_scale: float | None = option(None, help="Initial layer scale; by default there is none.")


@dataclass(frozen=True)
class Data:
    """The data set."""

    name: str = option(
        "folder",
        help="Images: digits, folder, shards, or a name of timm's such as hfds/NAME. "
        "Clips: ucf101, moving. Boxes: coco, scenes. Text: stdlib, text.",
    )
    root: str | None = option(None, runtime=True, help="The folder of the data set.")
    train_split: str = option("train", help="Name of the training split.")
    val_split: str = option("validation", help="Name of the validation split.")
    holdout: float = option(
        0.0, help="Share of the training images that validates, instead of the validation split."
    )
    num_classes: int = option(1000, minimum=1, help="Number of classes.")
    in_chans: int = option(3, minimum=1, help="Channels of an image.")
    frames: int = option(0, help="Frames of a clip; 0 for images.")
    mean: tuple[float, ...] = option((0.485, 0.456, 0.406), help="Mean of every channel.")
    std: tuple[float, ...] = option(
        (0.229, 0.224, 0.225), help="Standard deviation of every channel."
    )
    exif_orientation: bool = option(
        False,
        help="Whether the EXIF orientation of images is applied; otherwise they are as stored.",
    )
    unreadable: str = option(
        "stop",
        choices=("stop", "skip"),
        runtime=True,
        help="If a file cannot be read: stop the run, or skip the file, name it, count it and load "
        "the next one.",
    )
    cache: bool = option(
        False, runtime=True, help="Whether images or videos are decoded once and kept in memory."
    )
    workers: int = option(
        8, runtime=True, help="Processes that load data, for each training process."
    )


@dataclass(frozen=True)
class Augment:
    """How training data is augmented, and how validation data is cropped."""

    scale: tuple[float, float] = option((0.08, 1.0), help="Range of the area of random crops.")
    ratio: tuple[float, float] = option(
        (0.75, 1.3333333333333333), help="Range of the aspect ratio of random crops."
    )
    hflip: float = option(0.5, help="Probability of a horizontal flip.")
    color_jitter: float = option(0.0, help="Strength of color jitter.")
    auto_augment: str | None = option(None, help="A policy of timm, such as rand-m9-mstd0.5-inc1.")
    erase: float = option(0.0, help="Probability of random erasing.")
    mixup: float = option(0.0, help="Alpha of mixup; 0 for none.")
    cutmix: float = option(0.0, help="Alpha of CutMix; 0 for none.")
    smoothing: float = option(0.0, help="Label smoothing.")
    repeats: int = option(
        1, minimum=1, help="Copies of an image in a batch (repeated augmentation)."
    )
    interpolation: str = option("bilinear", help="Interpolation of resized images.")
    frames: str = option(
        "random",
        choices=("random", "uniform"),
        help="Frame of each part of a video in a training clip: random, or uniform for the middle.",
    )
    crop_pct: float = option(
        0.875, help="Side of the evaluation crop, as a share of the image's shorter side."
    )


@dataclass(frozen=True)
class Optim:
    """The optimizer and its schedule."""

    name: str = option("adamw", help="An optimizer of timm.")
    lr: float = option(1e-3, help="Learning rate.")
    angle_lr_scale: float = option(1.0, help="Factor on the learning rate of the angles.")
    layer_decay: float = option(
        1.0,
        above=0,
        maximum=1,
        help="Factor on the learning rate from each layer to the one before it.",
    )
    weight_decay: float = option(0.01, help="Weight decay of matrices.")
    betas: tuple[float, float] = option((0.9, 0.999), help="Betas of Adam.")
    schedule: str = option("cosine", help="A schedule of timm.")
    warmup_ratio: float = option(0.02, help="Share of the steps with a linear warm-up.")
    min_lr: float = option(0.0, help="Learning rate at the end of the schedule.")
    clip_grad: float | None = option(
        None, help="Largest norm of the gradient; by default unlimited."
    )


@dataclass(frozen=True)
class Train:
    """Training."""

    start_from: str | None = option(
        None,
        help="Initial weights: the folder of a finished run, or timm:NAME for weights of timm.",
    )
    epochs: int = option(200, minimum=1, help="Passes over the training data.")
    batch_size: int = option(
        6144,
        minimum=1,
        help="Samples of an optimizer step, over all processes and accumulated parts.",
    )
    accumulate: int = option(
        1, minimum=1, runtime=True, help="Parts of a step, computed one after the other."
    )
    seed: int = option(0, help="Seed of all random draws.")
    perturbation: float = option(
        1.0, help="Perturbation of the coordinates, in patches (the paper's sigma)."
    )
    perturbation_per: str = option(
        "sample",
        choices=("sample", "batch"),
        help="Whether each sample has its own perturbation, or the batch shares one.",
    )
    perturbation_axes: tuple[int, ...] = option(
        (), help="Indices of the perturbed axes; by default all."
    )
    precision: str = option(
        "no", choices=("no", "bf16", "fp16"), help="Mixed precision; no for float32."
    )
    compile: bool = option(False, runtime=True, help="Whether the model is compiled.")
    ema: float | None = option(
        None, help="Decay of the averaged weights that are evaluated; by default no average."
    )
    strategy: str = option(
        "ddp",
        choices=("ddp", "fsdp2"),
        runtime=True,
        help="Several processes: ddp for replicated, fsdp2 for sharded models.",
    )
    device: str = option(
        "auto", choices=("auto", "cpu"), runtime=True, help="Device: auto for a GPU if available."
    )
    checkpoint_every: int = option(
        500, minimum=1, runtime=True, help="Steps between checkpoints; there is one at the end too."
    )
    keep: int = option(2, minimum=1, runtime=True, help="Number of checkpoints to keep.")
    log_every: int = option(20, minimum=1, runtime=True, help="Steps between lines of the log.")


@dataclass(frozen=True)
class Evaluate:
    """The views of evaluation, and how often the model is evaluated."""

    resolutions: tuple[int, ...] = option(
        (112, 128, 192, 224, 256, 320, 384, 448, 512),
        runtime=True,
        help="Resolutions, in pixels.",
    )
    frames: tuple[int, ...] = option(
        (), runtime=True, help="Numbers of frames per clip, in addition to data.frames."
    )
    spans: tuple[float, ...] = option(
        (), runtime=True, help="Shares of the video that a clip covers, in addition to 1."
    )
    reversed: bool = option(
        False,
        runtime=True,
        help="Whether clips are also evaluated in reverse, from the last frame to the first.",
    )
    batch_size: int = option(
        512,
        minimum=1,
        runtime=True,
        help="Samples of a batch over all processes, at the training resolution.",
    )
    every: int = option(
        10,
        runtime=True,
        help="Epochs between evaluations in the training view; 0 for none before the end.",
    )


@dataclass(frozen=True)
class Detect:
    """Detection: the detector around the ViT, and the size and scale of images."""

    kind: str = option(
        "mask", choices=("mask", "box"), help="Detector: mask for Mask R-CNN, box for Faster R-CNN."
    )
    image_size: int = option(
        1024, minimum=1, help="Side of the square that images are resized and padded to."
    )
    window: int = option(14, minimum=1, help="Side of an attention window, in patches.")
    scale: str = option("relative", choices=("relative", "patch"), help="Unit of the coordinates.")
    anchors: tuple[float, ...] = option(
        (32, 64, 128, 256, 512), help="Anchor sizes in pixels, one per level of the pyramid."
    )
    finest_stride: int | None = option(
        None, help="Stride of the finest level, in pixels; by default a quarter of a patch."
    )
    graph: bool = option(
        False,
        runtime=True,
        help="Whether the backbone is replayed as a CUDA graph; only on one GPU without "
        "train.accumulate.",
    )
    out_channels: int = option(256, minimum=1, help="Channels of every level.")
    head_channels: int = option(1024, minimum=1, help="Channels of the box head.")
    proposals: int = option(1000, minimum=1, help="Proposals per image; twice as many in training.")
    samples: int = option(512, minimum=1, help="Proposals per image that train the heads.")
    jitter: tuple[float, float] = option(
        (0.1, 2.0), help="Range of the scale of large-scale jitter."
    )


@dataclass(frozen=True)
class Language:
    """Text: how it is tokenized, cut into sequences and evaluated."""

    tokenizer: str = option(
        "bytes", help="bytes, or the name or folder of a tokenizer of Hugging Face."
    )
    context: int = option(256, minimum=2, help="Tokens of a training sequence.")
    epoch_sequences: int = option(
        0, help="Training sequences of an epoch; 0 for all. The next epoch continues the text."
    )
    validation_bytes: int = option(
        0, help="Bytes at the start of the validation text that are evaluated; 0 for all."
    )
    lengths: tuple[float, ...] = option(
        (0.5, 1, 2, 4, 8),
        runtime=True,
        help="Context lengths of evaluation, as multiples of language.context.",
    )
    text_column: str = option("text", help="The column of a data set hfds/NAME with the text.")
    lora_rank: int = option(
        0, help="Rank of the adapters (LoRA) that train a model hf:NAME; 0 trains all weights."
    )


@dataclass(frozen=True)
class Config:
    """A complete run."""

    task: str = option(
        "",
        help="The task: a name of TASKS, or package.module:Class; by default derived from "
        "data.name.",
    )
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)
    detect: Detect = field(default_factory=Detect)
    language: Language = field(default_factory=Language)
    # Of a task that is defined outside of comrope, and checked by that task.
    options: dict[str, Scalar] = field(default_factory=dict, hash=False)

    def with_overrides(self, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
        """Return a copy with other values of some fields.

        Args:
            overrides: Texts such as "train.epochs=3" from a command line, or values by dotted name.

        Raises:
            UserError: A field is unknown, or a value is invalid.
        """
        if not isinstance(overrides, Mapping):
            overrides = dict(_split(text) for text in overrides)
        fields, changes = upgrade(overrides)
        for change in changes:
            warnings.warn(change, DeprecationWarning, stacklevel=2)
        tree, own = to_dict(self), flat(self)
        for name, value in fields.items():
            section, _, key = name.partition(".")
            if name not in own and not (section == "options" and key):
                raise UserError(f"{name}: no such field{suggest(name, own)}")
            if key:
                tree[section][key] = value
            else:
                tree[name] = value
        return build_config(tree)


def build_config(tree: Mapping[str, Any], where: str = "") -> Config:
    """Build a configuration from sections with fields.

    Args:
        tree: Sections with plain values by field; fields outside of any section by name.
        where: Text before a field's name in messages.

    Raises:
        UserError: A field is unknown, a value is invalid, or two values contradict each other. The
            task checks fields of its kind of data.
    """
    config: Config = build(Config, tree, where)
    train = config.train
    if (train.precision, train.strategy) == ("fp16", "fsdp2"):
        raise UserError("train.precision: expected no or bf16 with train.strategy=fsdp2, got fp16")
    if train.batch_size % train.accumulate:
        raise UserError(
            f"train.accumulate: expected a divisor of train.batch_size {train.batch_size}, got "
            f"{train.accumulate}"
        )
    return config


def _split(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise UserError(f"{text}: expected a field and its value, such as train.epochs=3")
    return name.strip(), Text(value)
