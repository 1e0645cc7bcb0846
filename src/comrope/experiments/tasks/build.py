"""Models of timm in our training: ``timm:NAME``, with ``comrope.swap`` for their rotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm
from safetensors import SafetensorError
from torch import Tensor, nn

from comrope import positions as coordinates
from comrope.analysis import rotary_modules
from comrope.experiments.common.console import say
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import TIMM, Config, Model
from comrope.integrations import swap
from comrope.methods import has_vanilla_frequencies

__all__ = ["Adopted", "adopt", "init_of", "pretrained_weights"]

# What a model of timm decides by itself.
ITS_OWN = (
    "class_token",
    "global_pool",
    "layer_scale",
    "axis_scale",
    "rotate_values",
    "locality_bias",
)


class Adopted(nn.Module):
    """A vision transformer of timm, with what training and evaluation ask of a ``ViT`` besides."""

    num_axes, ape, axis_scale = 2, None, None

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.patches = Cut(model.patch_embed.patch_size)
        self.train_grid = tuple(model.patch_embed.grid_size)
        self.num_prefix_tokens = model.num_prefix_tokens

    @property
    def blocks(self) -> Any:
        return self.model.blocks

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits. It finds the positions itself: the patch centres, as those handed to it are."""
        return self.model(x)

    def token_positions(self, grid: Sequence[int], patch_units: float = 0.0) -> Tensor:
        """Where they are seen to be: those that it uses are its own, whatever is asked."""
        place = coordinates.grid(grid, device=self.model.patch_embed.proj.weight.device)
        return coordinates.with_class_token(place, count=self.num_prefix_tokens)

    def position_parameters(self) -> int:
        """How many parameters the position encoding has: angles, and absolute positions in use."""
        angles = (p for module in rotary_modules(self).values() for p in module.parameters())
        table: nn.Parameter | None = getattr(self.model, "pos_embed", None)
        in_use = 0 if table is None or not table.requires_grad else table.numel()
        return sum(p.numel() for p in angles) + in_use


class Cut:
    """How an image is cut into patches, as ``ViT.patches`` knows it."""

    def __init__(self, patch_size: Sequence[int]) -> None:
        self.patch_size = tuple(patch_size)

    def grid_shape(self, canvas: Sequence[int]) -> tuple[int, ...]:
        return tuple(size // patch for size, patch in zip(canvas, self.patch_size, strict=True))


def init_of(model: Model) -> str:
    """The library's name of an initialization."""
    return {"rope-random-axes": "turned", "isotropic": "scattered"}.get(model.init, model.init)


def adopt(config: Config) -> Adopted:
    """The model of ``timm:NAME`` with random weights, its rotations swapped in.

    Position "ape" leaves it as it is; a method keeps its absolute positions if ``model.ape``.
    """
    model = config.model
    if changed := [name for name in ITS_OWN if getattr(model, name) != getattr(Model(), name)]:
        raise UserError(f"model.{changed[0]}: a model of timm decides it; leave it as it is")
    train = config.train
    for field, value, none in (
        ("perturbation", train.perturbation, 0),
        ("rescale", train.rescale, 1),
    ):
        if value != none:
            raise UserError(
                f"train.{field}: expected {none}, since the absolute positions of a model of timm "
                f"cannot be moved, got {value:g}"
            )
    adopted = Adopted(_create(config, model.name.removeprefix(TIMM)))
    if model.position == "ape":
        return adopted
    vanilla = has_vanilla_frequencies(model.position, init_of(model))
    in_patches = vanilla and model.position_units == "patch"
    try:
        swap(
            adopted.model,
            model.position,
            ape="keep" if model.ape else "drop",
            class_position=model.class_position,
            init=init_of(model),
            spread=model.spread,
            block_size=model.block_size,
            base=model.base,
            position_scale=adopted.train_grid if in_patches else None,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return adopted


def pretrained_weights(config: Config, name: str) -> tuple[dict[str, Tensor], int]:
    """What timm has under ``name``, for the model of a configuration, and how many classes it knew.

    Downloaded unless it is there already; safetensors or nothing, so that no pickle is ever read.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    short = name.removeprefix(TIMM)
    known = timm.get_pretrained_cfg(short) if timm.is_model(short) else None
    if known is None or not known.hf_hub_id:
        raise UserError(f"train.start_from: timm has no weights {short!r}")
    file = known.hf_hub_filename or "model.safetensors"
    try:
        if not file.endswith(".safetensors"):
            raise OSError(f"{file} is not safetensors")
        place = huggingface_hub.hf_hub_download(known.hf_hub_id, file)
        model = _create(config, short, pretrained=True, pretrained_cfg_overlay={"file": place})
    except (OSError, RuntimeError, SafetensorError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"train.start_from: {name} cannot be had ({reason})") from None
    if (tuple(known.mean), tuple(known.std)) != (config.data.mean, config.data.std):
        say(f"{name} was trained with data.mean={known.mean} data.std={known.std}, other than here")
    return {f"model.{key}": tensor for key, tensor in model.state_dict().items()}, known.num_classes


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
