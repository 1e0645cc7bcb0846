"""One vision transformer for any number of axes: sequences, images and clips share the code.

Shapes: B batch, T patches or tokens, N axes, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from comrope import _checks
from comrope import positions as coordinates
from comrope._deprecated import renamed_keywords
from comrope._dtypes import constants_like
from comrope.methods import METHODS, has_vanilla_frequencies
from comrope.models.attention import Block
from comrope.models.embeddings import AbsolutePositions, Patches
from comrope.models.transformer import RotaryTransformer, check_divisor, check_rotation
from comrope.rotary import RotaryEmbedding

__all__ = ["POSITIONS", "ViT"]

POSITIONS = (*METHODS, "ape", "none")
POOLS = ("token", "avg")
CLASS_POSITIONS = ("center", "unrotated")
POSITION_UNITS = ("patch", "relative")
AXES = {1: ("patches",), 2: ("rows", "columns"), 3: ("frames", "rows", "columns")}  # names
# Names of older versions: accepted as keywords with a warning, and in saved files.
RENAMED = {"near": "locality_bias", "rope_units": "position_units"}


class ViT(RotaryTransformer):
    """A plain vision transformer with one position encoding, on any number of axes.

    Args:
        img_size: Canvas at training, one size for two axes or one per axis: (224, 224) is an image,
            (1024,) a sequence, (8, 224, 224) a clip. The model runs at other sizes too.
        patch_size: One size for all axes or one per axis.
        in_chans: Channels of the canvas.
        num_classes: Outputs of the classifier; 0 for none.
        embed_dim, depth, num_heads, mlp_ratio, drop_path_rate, layer_scale: As in timm.
        position: A method of ``comrope.METHODS``, ``"ape"`` (one learned vector per patch of the
            training grid, interpolated) or ``"none"``.
        ape: Absolute positions in addition to the rotations of a method, for models that were
            trained with them and are fine-tuned with rotations.
        rotate_values: Rotate values too, and the outputs of attention back. Outputs then depend on
            the positions of values relative to the query.
        locality_bias: Attention score at zero distance that the initial biases of queries and keys
            give; it decreases with the distance, so heads start by preferring close tokens. 0:
            biases of zero.
        block_size, init: As in ``RotaryEmbedding``; ``init`` is a name, so that it can be saved.
        position_units: Unit of the coordinates that vanilla RoPE's frequencies multiply, in method
            ``"rope"`` and the inits that use them: ``"patch"``, patches of the training grid, as
            usual; ``"relative"``, the width of the image, as the paper says.
        base: Vanilla RoPE's base, 10000 by default.
        axis_scale: Factors of the coordinates of each axis, by default 1, applied first, also to
            perturbed coordinates. Zero removes an axis: with (0, 1, 1) all frames of a clip have
            the same time.
        class_token: Whether a class token comes before the patches.
        class_position: ``"center"``, the class token is at the centre of the canvas and is
            perturbed with it; ``"unrotated"``, it is not rotated.
        global_pool: ``"token"``, the class token is classified; ``"avg"``, the mean of the patches.
        init_std: Standard deviation of initial weights and absolute positions. The usual 0.02 suits
            widths of hundreds; narrow models learn faster with more.
        rotary_options: Other options of ``RotaryEmbedding`` (see ``ROTARY_OPTIONS``).
    """

    renamed_arguments = RENAMED
    input_name = "x"

    @renamed_keywords(RENAMED)
    def __init__(
        self,
        *,
        img_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        position: str = "comrope-ld",
        ape: bool = False,
        rotate_values: bool = False,
        locality_bias: float = 0.0,
        block_size: int = 8,
        init: str = "normal",
        position_units: str = "patch",
        base: float | None = None,
        axis_scale: float | Sequence[float] | None = None,
        class_token: bool = True,
        class_position: str = "center",
        global_pool: str = "token",
        drop_path_rate: float = 0.0,
        layer_scale: float | None = None,
        init_std: float = 0.02,
        **rotary_options: Any,
    ) -> None:
        given = locals()
        super().__init__()
        self.note_arguments(given, rotary_options)
        canvas = _sizes("img_size", img_size, 2 if isinstance(patch_size, int) else len(patch_size))
        patch = _sizes("patch_size", patch_size, len(canvas))
        _checks.one_of("position", position, POSITIONS)
        if ape and position == "none":
            raise ValueError(
                "ape: expected False with position 'none'; position='ape' is APE alone"
            )
        check_rotation(
            position,
            init=init,
            default_init="normal",
            base=base,
            rotary_options=rotary_options,
            rotate_values=(rotate_values, False),
            locality_bias=(locality_bias, 0),
        )
        _checks.one_of("position_units", position_units, POSITION_UNITS)
        _checks.one_of("class_position", class_position, CLASS_POSITIONS)
        _check_pool(global_pool, class_token)
        check_divisor("num_heads", num_heads, embed_dim=embed_dim)
        if "num_axes" in rotary_options:
            raise TypeError(
                "num_axes: expected none, since the length of img_size sets it, such as (1024,) or "
                "(8, 224, 224)"
            )
        self.num_axes, self.init_std = len(canvas), _checks.real("init_std", init_std)
        self.locality_bias = _checks.real("locality_bias", locality_bias)
        self.position, self.class_position, self.global_pool = position, class_position, global_pool
        self.num_classes, self.num_features = num_classes, embed_dim
        self.num_prefix_tokens = int(class_token)
        self.patches = Patches(patch, _checks.integer("in_chans", in_chans, 1), embed_dim)
        self.train_grid = self.patches.grid_shape(canvas)
        factors = 1.0 if axis_scale is None else axis_scale
        scale = _checks.per_axis("axis_scale", factors, self.num_axes)
        self.axis_scale = None if all(factor == 1 for factor in scale) else scale
        self._given["axis_scale"] = self.axis_scale
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if class_token else None
        absolute = ape or position == "ape"
        self.ape = AbsolutePositions(self.train_grid, embed_dim) if absolute else None

        def rope() -> RotaryEmbedding | None:
            if position not in METHODS:
                return None
            in_patches = has_vanilla_frequencies(position, init) and position_units == "patch"
            return RotaryEmbedding(
                position,
                num_heads=num_heads,
                head_dim=embed_dim // num_heads,
                num_axes=self.num_axes,
                block_size=block_size,
                init=init,
                base=base,
                position_scale=self.train_grid if in_patches else None,
                num_prefix_tokens=self.num_prefix_tokens if class_position == "unrotated" else 0,
                **rotary_options,
            )

        rates = [drop_path_rate * layer / max(depth - 1, 1) for layer in range(depth)]
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                rope=rope(),
                rotate_values=rotate_values,
                mlp_ratio=mlp_ratio,
                drop_path=rate,
                layer_scale=layer_scale,
            )
            for rate in rates
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.reset_parameters()

    def arguments(self) -> dict[str, Any]:
        """Return the keywords that make the same model, classifier changes included."""
        return {
            **super().arguments(),
            "num_classes": self.num_classes,
            "global_pool": self.global_pool,
        }

    def token_positions(self, grid: Sequence[int] | None = None) -> Tensor:
        """Return the coordinates of the tokens of a grid of patches, class token first.

        Args:
            grid: Patches along each axis, by default the training grid.

        Returns:
            (T [+ 1], N), relative to the canvas, which is [0, 1] for any grid.
        """
        grid = tuple(grid or self.train_grid)
        centers = coordinates.grid(grid, device=self.patches.proj.weight.device)
        return coordinates.with_class_token(centers, count=self.num_prefix_tokens)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits (B, num_classes) of a canvas.

        Args:
            x: (B, C, X_1, ..., X_N).
            positions: Coordinates of the patches, relative to the canvas, (T, N) or (B, T, N), by
                default the patch centres; the class token is at the centre. Or those of all
                tokens, class token first.
        """
        return self.forward_head(self.forward_features(x, positions))

    def forward_features(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return all tokens after the last norm, (B, [1 +] T, C)."""
        if x.ndim != 2 + self.num_axes or x.shape[1] != self.patches.in_chans:
            raise ValueError(
                f"x: expected (B, {self.patches.in_chans}, ...) with {self.num_axes} sizes, "
                f"got {tuple(x.shape)}"
            )
        positions = self._positions(positions, self.patches.grid_shape(x.shape[2:]))
        # The residual stream has the precision of the weights: float32 under autocast, as in timm.
        x = self.patches(x).to(self.norm.weight.dtype)
        if self.axis_scale is not None:
            positions = positions * constants_like(self.axis_scale, positions)
        if self.ape is not None:
            x = x + self.ape(positions[..., self.num_prefix_tokens :, :])
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return self.norm(self.apply_blocks(x, positions))

    def example_input(
        self, batch: int, more: int = 0, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return a random canvas (B, C, X_1, ..., X_N); axis i has ``more`` + i more patches."""
        sizes = [
            patch * (count + (more + axis if more and count > 1 else 0))
            for axis, (patch, count) in enumerate(
                zip(self.patches.patch_size, self.train_grid, strict=True)
            )
        ]
        return torch.randn(batch, self.patches.in_chans, *sizes, generator=generator)

    def dynamic_sizes(self) -> dict[int, tuple[str, int]]:
        """Return all axes, except those with only one patch."""
        names = AXES.get(self.num_axes, [f"patches_{axis}" for axis in range(self.num_axes)])
        return {
            2 + axis: (names[axis], patch)
            for axis, patch in enumerate(self.patches.patch_size)
            if self.train_grid[axis] > 1
        }

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        pooled = self.global_pool == "avg"
        x = x[:, self.num_prefix_tokens :].mean(1) if pooled else x[:, 0]
        return x if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            _check_pool(global_pool, self.num_prefix_tokens > 0)
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.to(self.norm.weight.device, self.norm.weight.dtype)
        self._reset_linear(self.head)

    def reset_parameters(self) -> None:
        """Initialize as timm does: truncated normals, zero biases; others reset themselves."""
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for module in (*self.blocks.modules(), self.head):
            self._reset_linear(module)
        if self.locality_bias:
            for block in cast(Iterable[Block], self.blocks):
                block.attn.set_locality_bias(self.locality_bias)
        if self.ape is not None:
            trunc_normal_(self.ape.codebook, std=self.init_std)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)

    def _reset_linear(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=self.init_std)
            nn.init.zeros_(module.bias)

    def position_parameters(self) -> int:
        """Count the parameters of the position encoding: angles and absolute positions."""
        codebook = 0 if self.ape is None else self.ape.codebook.numel()
        return codebook + super().position_parameters()

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: tokens, positions, angles."""
        return super().no_weight_decay() | {"cls_token", "ape.codebook"}

    def _positions(self, positions: Tensor | None, grid: tuple[int, ...]) -> Tensor:
        default = self.token_positions(grid)
        if positions is None:
            return default
        tokens = default.shape[0]
        if positions.shape[-2] == tokens:
            return positions
        if positions.shape[-2] != tokens - self.num_prefix_tokens:
            raise ValueError(
                f"positions: expected {tokens - self.num_prefix_tokens} rows, one per patch, or "
                f"{tokens}, one per token, got {positions.shape[-2]}"
            )
        return coordinates.with_class_token(positions, count=self.num_prefix_tokens)


def _sizes(label: str, value: int | Sequence[int], num_axes: int) -> tuple[int, ...]:
    sizes = (value,) * num_axes if isinstance(value, int) else tuple(value)
    if label == "patch_size" and len(sizes) != num_axes:
        raise ValueError(f"{label}: expected {num_axes} sizes, as img_size has, got {value!r}")
    return tuple(_checks.integer(label, size, 1) for size in sizes)


def _check_pool(global_pool: str, class_token: bool) -> None:
    _checks.one_of("global_pool", global_pool, POOLS)
    if global_pool == "token" and not class_token:
        raise ValueError("global_pool: 'token' needs class_token=True, got False")
