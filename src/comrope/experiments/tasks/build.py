"""Build models from a configuration: our ViTs, and timm's with swapped rotations.

A field of the section ``model`` is passed to the parameter of ``ViT`` or ``RotaryEmbedding`` with
the same name. So a new model option is one parameter there and one field of ``Model``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import timm
from safetensors import SafetensorError
from torch import Tensor, nn

from comrope import positions as coordinates
from comrope.analysis import rotary_modules
from comrope.experiments.common.console import say
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.memory import require_memory
from comrope.experiments.config import TIMM, Config, Model
from comrope.experiments.tasks.checks import require_defaults
from comrope.integrations import swap
from comrope.methods import METHODS, has_vanilla_frequencies
from comrope.models import ViT, create_model
from comrope.models.registry import NAME, SIZES
from comrope.rotary import RotaryEmbedding

__all__ = [
    "DECIDED_BY_TIMM",
    "TimmModel",
    "build_timm_model",
    "build_vit",
    "model_options",
    "pretrained_weights",
    "training_resolution",
]

FIELDS = tuple(field.name for field in dataclasses.fields(Model))
NO_ARGUMENTS = ("name", "tubelet")  # fields that determine sizes
OF_ROTATION = set(inspect.signature(RotaryEmbedding.__init__).parameters)
OF_SWAP = {"position", "ape", "class_position"} | OF_ROTATION  # "position" is swap's "method"
# Fields that have no effect on a model of timm. drop_path_rate is an argument of its constructor,
# and position_units becomes a position_scale.
DECIDED_BY_TIMM = tuple(
    name
    for name in FIELDS
    if name not in OF_SWAP and name not in (*NO_ARGUMENTS, "drop_path_rate", "position_units")
)


def training_resolution(name: str) -> tuple[int, int]:
    """Return the training resolution of ``model.name``, (rows, columns) in pixels."""
    if name.startswith(TIMM):
        about = timm.get_pretrained_cfg(name.removeprefix(TIMM))
        if about is None:
            raise UserError(f"model.name: timm has no {name.removeprefix(TIMM)!r}")
        return about.input_size[-2], about.input_size[-1]
    size = int(name.rsplit("_", 1)[1])
    return size, size


def model_options(model: Model, kind: type[nn.Module]) -> dict[str, Any]:
    """Return the fields of the section ``model`` that are arguments of a model or its rotations.

    Args:
        model: The section.
        kind: The class of the model.

    Raises:
        UserError: Another field is set.
    """
    own = set(inspect.signature(kind.__init__).parameters) | OF_ROTATION
    others = [name for name in FIELDS if name not in own and name not in NO_ARGUMENTS]
    require_defaults("model", model, others, f"a {kind.__name__}")
    rotates = model.position in METHODS
    chosen = [name for name in FIELDS if name in own and (rotates or name not in OF_ROTATION)]
    values = {name: getattr(model, name) for name in chosen if name not in NO_ARGUMENTS}
    return {name: None if value == () else value for name, value in values.items()}


def build_vit(config: Config, **options: Any) -> ViT:
    """Return the ViT of a configuration with random weights.

    Args:
        config: The configuration.
        options: Arguments of ``ViT`` that are not in the section ``model``.
    """
    options = {**model_options(config.model, ViT), **options}
    _check_memory(config, options)
    try:
        return create_model(
            config.model.name,
            num_classes=config.data.num_classes,
            in_chans=config.data.in_chans,
            **options,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None


def _check_memory(config: Config, options: Mapping[str, Any]) -> None:
    """Raise unless the memory may suffice for the weights of a ViT with these options."""
    match = NAME.fullmatch(config.model.name)
    if match is None or match[1] not in SIZES:
        return  # ``create_model`` raises
    width, patch = SIZES[match[1]]["embed_dim"], (int(match[2]),) * 2
    sizes = options.get("patch_size", patch)
    canvas = options.get("img_size", (int(match[3]),) * 2)
    rows = {
        "model.name": config.data.in_chans * math.prod(sizes),
        "data.num_classes": config.data.num_classes,
    }
    if options.get("ape") or config.model.position == "ape":
        rows["model.name"] += math.prod(canvas) // math.prod(sizes)
    where = max(rows, key=lambda name: rows[name])
    require_memory(4 * width * sum(rows.values()), where, "the weights")


class TimmModel(nn.Module):
    """A vision transformer of timm with the attributes of ``ViT`` that experiments use."""

    num_axes, ape, axis_scale = 2, None, None

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.patches = PatchGrid(model.patch_embed.patch_size)
        self.train_grid = tuple(model.patch_embed.grid_size)
        self.num_prefix_tokens = model.num_prefix_tokens
        self.num_features = model.num_features

    @property
    def blocks(self) -> Any:
        return self.model.blocks

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits. ``positions`` has no effect: the model computes its own."""
        return self.model(x)

    def token_positions(self, grid: Sequence[int]) -> Tensor:
        """Return the positions of the model, with class tokens: (T, 2)."""
        place = coordinates.grid(grid, device=self.model.patch_embed.proj.weight.device)
        return coordinates.with_class_token(place, count=self.num_prefix_tokens)

    def position_parameters(self) -> int:
        """Return the number of angles, plus absolute positions if they are used."""
        angles = (p for module in rotary_modules(self).values() for p in module.parameters())
        table: nn.Parameter | None = getattr(self.model, "pos_embed", None)
        in_use = 0 if table is None or not table.requires_grad else table.numel()
        return sum(p.numel() for p in angles) + in_use


class PatchGrid:
    """The patches of an image, with the attributes of ``ViT.patches``."""

    def __init__(self, patch_size: Sequence[int]) -> None:
        self.patch_size = tuple(patch_size)

    def grid_shape(self, canvas: Sequence[int]) -> tuple[int, ...]:
        return tuple(size // patch for size, patch in zip(canvas, self.patch_size, strict=True))


def build_timm_model(config: Config) -> TimmModel:
    """Return the model of ``timm:NAME`` with random weights, its rotations swapped in.

    Position "ape" leaves it unchanged; a method keeps its absolute positions if ``model.ape``.
    """
    model = config.model
    require_defaults("model", model, DECIDED_BY_TIMM, "a model of timm")
    if config.train.perturbation:
        raise UserError(
            "train.perturbation: expected 0, since the absolute positions of a model of timm "
            f"cannot be moved, got {config.train.perturbation:g}"
        )
    built = TimmModel(_create(config, model.name.removeprefix(TIMM)))
    if model.position == "ape":
        return built
    options = {name: getattr(model, name) for name in FIELDS if name in OF_ROTATION}
    try:
        vanilla = has_vanilla_frequencies(model.position, model.init)
        in_patches = vanilla and model.position_units == "patch"
        swap(
            built.model,
            model.position,
            ape="keep" if model.ape else "drop",
            class_position=model.class_position,
            position_scale=built.train_grid if in_patches else None,
            **options,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return built


def pretrained_weights(config: Config, name: str) -> tuple[dict[str, Tensor], int]:
    """Return timm's weights ``name`` for the model of a configuration, and their number of classes.

    They are downloaded unless they are cached. Only safetensors are read, never pickles.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    short = name.removeprefix(TIMM)
    about = timm.get_pretrained_cfg(short) if timm.is_model(short) else None
    if about is None or not about.hf_hub_id:
        raise UserError(f"train.start_from: timm has no weights {short!r}")
    file = about.hf_hub_filename or "model.safetensors"
    try:
        if not file.endswith(".safetensors"):
            raise OSError(f"{file} is not safetensors")
        place = huggingface_hub.hf_hub_download(about.hf_hub_id, file)
        model = _create(config, short, pretrained=True, pretrained_cfg_overlay={"file": place})
    except (OSError, RuntimeError, SafetensorError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"train.start_from: {name} cannot be downloaded ({reason})") from None
    if (tuple(about.mean), tuple(about.std)) != (config.data.mean, config.data.std):
        say(f"{name} was trained with data.mean={about.mean} data.std={about.std}, unlike this run")
    return {f"model.{key}": tensor for key, tensor in model.state_dict().items()}, about.num_classes


def _create(config: Config, name: str, **options: Any) -> nn.Module:
    if not timm.is_model(name):
        raise UserError(f"model.name: timm has no {name!r}")
    try:
        return timm.create_model(
            name,
            num_classes=config.data.num_classes,
            in_chans=config.data.in_chans,
            drop_path_rate=config.model.drop_path_rate,
            dynamic_img_size=True,
            **options,
        )
    except TypeError as error:
        raise UserError(f"model.name: {name} is none of timm's plain ViTs ({error})") from None
