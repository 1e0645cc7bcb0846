"""The fields of a run: their meanings, defaults, and accepted values."""

from __future__ import annotations

from dataclasses import dataclass

from comrope.experiments.config.build import option

__all__ = [
    "TIMM",
    "Augment",
    "Data",
    "Detect",
    "Evaluate",
    "Language",
    "Model",
    "Optim",
    "Train",
]

SHORT = 200  # characters of a name
TIMM = "timm:"  # prefix of names of timm's models and weights


@dataclass(frozen=True)
class Model:
    """The network, and how it encodes positions."""

    name: str = option(
        "vit_base_patch16_224",
        longest=SHORT,
        help="Size, patch size and training resolution, or timm:NAME for a model of timm. For "
        "text: gpt_SIZE, or hf:NAME for a causal model of transformers, by name or folder.",
    )
    position: str = option(
        "comrope-ld",
        longest=SHORT,
        help="The position encoding: a method of comrope.METHODS, ape or none.",
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
        maximum=1000,
        help="Initial attention score at distance zero, which decreases with the distance; 0 for "
        "none.",
    )
    block_size: int = option(
        8, minimum=2, maximum=1024, help="Size b of the blocks of the rotation matrices."
    )
    init: str = option("normal", longest=SHORT, help="Initialization of the angles.")
    position_units: str = option(
        "patch",
        choices=("patch", "relative"),
        help="Unit of the coordinates of vanilla RoPE frequencies.",
    )
    spread: float = option(
        1.0,
        above=0,
        maximum=1000,
        help="Factor on the standard deviation of the initialization normal.",
    )
    base: float | None = option(
        None,
        above=0,
        maximum=1e12,
        help="Base of vanilla RoPE frequencies; by default the method's.",
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
    tubelet: int = option(1, minimum=1, maximum=1024, help="Frames of one patch, for clips.")
    axis_scale: tuple[float, ...] = option(
        (),
        maximum=1e6,
        nonzero=True,
        longest=8,
        help="Factor on the coordinates, one number per axis; 0 removes the axis.",
    )
    class_token: bool = option(True, help="Whether there is a class token.")
    class_position: str = option(
        "center", choices=("center", "unrotated"), help="Coordinates of the class token."
    )
    global_pool: str = option(
        "token", choices=("token", "avg"), help="Input of the head: token, or avg for the mean."
    )
    drop_path_rate: float = option(0.0, below=1, help="Rate of stochastic depth in the last layer.")
    layer_scale: float | None = option(
        None, maximum=100, help="Initial layer scale; by default there is none."
    )


@dataclass(frozen=True)
class Data:
    """The data set."""

    name: str = option(
        "folder",
        longest=SHORT,
        help="Images: digits, folder, shards, or a name of timm's such as hfds/NAME. "
        "Clips: ucf101, moving. Boxes: coco, scenes. Text: stdlib, text.",
    )
    root: str | None = option(None, runtime=True, help="The folder of the data set.")
    train_split: str = option("train", longest=SHORT, help="Name of the training split.")
    val_split: str = option("validation", longest=SHORT, help="Name of the validation split.")
    holdout: float = option(
        0.0,
        below=1,
        help="Share of the training images that validates, instead of the validation split.",
    )
    num_classes: int = option(1000, minimum=1, maximum=1_000_000, help="Number of classes.")
    in_chans: int = option(3, minimum=1, maximum=1024, help="Channels of an image.")
    frames: int = option(0, maximum=4096, help="Frames of a clip; 0 for images.")
    mean: tuple[float, ...] = option(
        (0.485, 0.456, 0.406),
        maximum=1,
        longest=1024,
        help="Mean of every channel, of values from 0 to 1.",
    )
    std: tuple[float, ...] = option(
        (0.229, 0.224, 0.225),
        minimum=1e-4,
        maximum=1,
        longest=1024,
        help="Standard deviation of every channel, of values from 0 to 1.",
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
        8,
        maximum=1024,
        runtime=True,
        help="Processes that load data, for each training process; at most one per CPU is started.",
    )


@dataclass(frozen=True)
class Augment:
    """How training data is augmented, and how validation data is cropped."""

    scale: tuple[float, float] = option(
        (0.08, 1.0),
        above=0,
        maximum=1,
        ordered=True,
        help="Range of the area of random crops, as a share of the image's.",
    )
    ratio: tuple[float, float] = option(
        (0.75, 1.3333333333333333),
        minimum=0.01,
        maximum=100,
        ordered=True,
        help="Range of the aspect ratio of random crops.",
    )
    hflip: float = option(0.5, maximum=1, help="Probability of a horizontal flip.")
    color_jitter: float = option(0.0, maximum=10, help="Strength of color jitter.")
    auto_augment: str | None = option(
        None, longest=SHORT, help="A policy of timm, such as rand-m9-mstd0.5-inc1."
    )
    erase: float = option(0.0, maximum=1, help="Probability of random erasing.")
    mixup: float = option(0.0, maximum=100, help="Alpha of mixup; 0 for none.")
    cutmix: float = option(0.0, maximum=100, help="Alpha of CutMix; 0 for none.")
    smoothing: float = option(0.0, below=1, help="Label smoothing.")
    repeats: int = option(
        1, minimum=1, maximum=1024, help="Copies of an image in a batch (repeated augmentation)."
    )
    interpolation: str = option(
        "bilinear",
        choices=("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos", "random"),
        help="Interpolation of resized images; random draws bilinear or bicubic in training, and "
        "evaluates with bicubic.",
    )
    frames: str = option(
        "random",
        choices=("random", "uniform"),
        help="Frame of each part of a video in a training clip: random, or uniform for the middle.",
    )
    crop_pct: float = option(
        0.875,
        minimum=0.1,
        maximum=1,
        help="Side of the evaluation crop, as a share of the image's shorter side.",
    )


@dataclass(frozen=True)
class Optim:
    """The optimizer and its schedule."""

    name: str = option("adamw", longest=SHORT, help="An optimizer of timm.")
    lr: float = option(1e-3, maximum=1000, help="Learning rate.")
    angle_lr_scale: float = option(
        1.0, maximum=1e6, help="Factor on the learning rate of the angles."
    )
    layer_decay: float = option(
        1.0,
        above=0,
        maximum=1,
        help="Factor on the learning rate from each layer to the one before it.",
    )
    weight_decay: float = option(0.01, maximum=1000, help="Weight decay of matrices.")
    betas: tuple[float, float] = option((0.9, 0.999), below=1, help="Betas of Adam.")
    schedule: str = option(
        "cosine",
        choices=("cosine", "tanh", "poly", "step", "multistep"),
        help="A schedule of timm that is a function of the step.",
    )
    warmup_ratio: float = option(0.02, maximum=1, help="Share of the steps with a linear warm-up.")
    min_lr: float = option(
        0.0, maximum=1000, help="Learning rate at the end of the schedule, at most optim.lr."
    )
    clip_grad: float | None = option(
        None, above=0, maximum=1e9, help="Largest norm of the gradient; by default unlimited."
    )


@dataclass(frozen=True)
class Train:
    """Training."""

    start_from: str | None = option(
        None,
        help="Initial weights: the folder of a finished run, or timm:NAME for weights of timm.",
    )
    epochs: int = option(200, minimum=1, maximum=1_000_000, help="Passes over the training data.")
    batch_size: int = option(
        6144,
        minimum=1,
        maximum=10_000_000,
        help="Samples of an optimizer step, over all processes and accumulated parts.",
    )
    accumulate: int = option(
        1,
        minimum=1,
        maximum=10_000_000,
        runtime=True,
        help="Parts of a step, computed one after the other; a divisor of train.batch_size.",
    )
    seed: int = option(0, maximum=2**63 - 1, help="Seed of all random draws.")
    perturbation: float = option(
        1.0,
        maximum=1000,
        help="Perturbation of the coordinates, in patches (the paper's sigma).",
    )
    perturbation_per: str = option(
        "sample",
        choices=("sample", "batch"),
        help="Whether each sample has its own perturbation, or the batch shares one.",
    )
    perturbation_axes: tuple[int, ...] = option(
        (), maximum=7, longest=8, help="Indices of the perturbed axes; by default all."
    )
    precision: str = option(
        "no", choices=("no", "bf16", "fp16"), help="Mixed precision; no for float32."
    )
    compile: bool = option(False, runtime=True, help="Whether the model is compiled.")
    ema: float | None = option(
        None,
        above=0,
        below=1,
        help="Decay of the averaged weights that are evaluated; by default no average.",
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
        500,
        minimum=1,
        maximum=10**9,
        runtime=True,
        help="Steps between checkpoints; there is one at the end too.",
    )
    keep: int = option(
        2, minimum=1, maximum=10**9, runtime=True, help="Number of checkpoints to keep."
    )
    log_every: int = option(
        20, minimum=1, maximum=10**9, runtime=True, help="Steps between lines of the log."
    )


@dataclass(frozen=True)
class Evaluate:
    """The views of evaluation, and how often the model is evaluated."""

    resolutions: tuple[int, ...] = option(
        (112, 128, 192, 224, 256, 320, 384, 448, 512),
        minimum=1,
        maximum=2**16,
        runtime=True,
        help="Resolutions, in pixels.",
    )
    frames: tuple[int, ...] = option(
        (),
        minimum=1,
        maximum=4096,
        runtime=True,
        help="Numbers of frames per clip, in addition to data.frames.",
    )
    spans: tuple[float, ...] = option(
        (),
        above=0,
        maximum=1,
        runtime=True,
        help="Shares of the video that a clip covers, in addition to 1.",
    )
    reversed: bool = option(
        False,
        runtime=True,
        help="Whether clips are also evaluated in reverse, from the last frame to the first.",
    )
    batch_size: int = option(
        512,
        minimum=1,
        maximum=10_000_000,
        runtime=True,
        help="Samples of a batch over all processes, at the training resolution.",
    )
    every: int = option(
        10,
        maximum=1_000_000,
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
        1024,
        minimum=1,
        maximum=2**14,
        help="Side of the square that images are resized and padded to.",
    )
    window: int = option(
        14, minimum=1, maximum=1024, help="Side of an attention window, in patches."
    )
    scale: str = option("relative", choices=("relative", "patch"), help="Unit of the coordinates.")
    anchors: tuple[float, ...] = option(
        (32, 64, 128, 256, 512),
        above=0,
        maximum=2**16,
        help="Anchor sizes in pixels, one per level of the pyramid.",
    )
    finest_stride: int | None = option(
        None,
        minimum=1,
        maximum=1024,
        help="Stride of the finest level, in pixels; by default a quarter of a patch.",
    )
    graph: bool = option(
        False,
        runtime=True,
        help="Whether the backbone is replayed as a CUDA graph; only on one GPU without "
        "train.accumulate.",
    )
    out_channels: int = option(256, minimum=1, maximum=2**14, help="Channels of every level.")
    head_channels: int = option(1024, minimum=1, maximum=2**14, help="Channels of the box head.")
    proposals: int = option(
        1000, minimum=1, maximum=100_000, help="Proposals per image; twice as many in training."
    )
    samples: int = option(
        512, minimum=1, maximum=100_000, help="Proposals per image that train the heads."
    )
    jitter: tuple[float, float] = option(
        (0.1, 2.0),
        minimum=0.01,
        maximum=100,
        ordered=True,
        help="Range of the scale of large-scale jitter.",
    )


@dataclass(frozen=True)
class Language:
    """Text: how it is tokenized, cut into sequences and evaluated."""

    tokenizer: str = option(
        "bytes", help="bytes, or the name or folder of a tokenizer of Hugging Face."
    )
    context: int = option(256, minimum=2, maximum=2**20, help="Tokens of a training sequence.")
    epoch_sequences: int = option(
        0,
        maximum=2**40,
        help="Training sequences of an epoch; 0 for all. The next epoch continues the text.",
    )
    validation_bytes: int = option(
        0,
        maximum=2**50,
        help="Bytes at the start of the validation text that are evaluated; 0 for all.",
    )
    lengths: tuple[float, ...] = option(
        (0.5, 1, 2, 4, 8),
        above=0,
        maximum=1024,
        shortest=1,
        longest=64,
        runtime=True,
        help="Context lengths of evaluation, as multiples of language.context.",
    )
    text_column: str = option(
        "text", longest=SHORT, help="The column of a data set hfds/NAME with the text."
    )
    lora_rank: int = option(
        0,
        maximum=2**14,
        help="Rank of the adapters (LoRA) that train a model hf:NAME; 0 trains all weights.",
    )
