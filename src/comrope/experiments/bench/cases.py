"""The sizes that the benchmarks measure, and comrope's rotations made for them.

Shapes: B batch, T tokens, N axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comrope import positions as coordinates
from comrope.analysis import rotary_modules
from comrope.models.registry import SIZES
from comrope.rotary import RotaryEmbedding

__all__ = [
    "Setting",
    "Shape",
    "block_size_of",
    "colour_of",
    "llama_positions",
    "llama_rotary",
    "llama_shape",
    "name_of",
    "own_rotation",
    "shape_of",
    "stir",
    "token_positions",
    "used_backend",
]


@dataclass(frozen=True)
class Setting:
    """The sizes that are measured, and where."""

    device: torch.device
    dtype: torch.dtype
    rounds: int
    compile: bool
    batch: int
    size: str  # of the ViT and of the attention layer: a key of comrope.models.registry.SIZES
    depth: int  # of the ViT
    grid: tuple[int, int]  # patches of 16 pixels
    llama_tokens: int
    llama_heads: int
    llama_key_heads: int
    llama_head_dim: int
    language: dict[str, int]  # a whole language model, in the words of its configuration
    copied_mib: int  # the yardstick of rotations; more than caches hold

    @property
    def modes(self) -> tuple[bool, ...]:
        """Not compiled, and compiled if that is wanted."""
        return (False, True) if self.compile else (False,)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Shape(NamedTuple):
    """The attention layer that a rival is made for; ``grid`` () is a sequence of ``tokens``."""

    tokens: int
    heads: int
    head_dim: int
    grid: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype

    @property
    def prefix(self) -> int:
        """Class tokens before the grid."""
        return self.tokens - self.grid[0] * self.grid[1] if self.grid else 0


def shape_of(setting: Setting) -> Shape:
    """An attention layer of the ViT that is measured."""
    size, (rows, columns) = SIZES[setting.size], setting.grid
    heads = size["num_heads"]
    dim = size["embed_dim"] // heads
    return Shape(1 + rows * columns, heads, dim, setting.grid, setting.device, setting.dtype)


def llama_shape(setting: Setting) -> Shape:
    tokens, heads, dim = setting.llama_tokens, setting.llama_heads, setting.llama_head_dim
    return Shape(tokens, heads, dim, (), setting.device, setting.dtype)


def token_positions(setting: Setting, per_sample: bool = False) -> Tensor:
    """Patch centres and the class token: (T, N), or (B, T, N) with the paper's noise on each."""
    place = coordinates.grid(setting.grid, device=setting.device)
    if per_sample:
        patch = [1 / size for size in setting.grid]
        place = coordinates.perturb(place, patch, 1.0, batch_size=setting.batch)
    return coordinates.with_class_token(place)


def block_size_of(method: str) -> int:
    return 2 if method in ("rope", "rope-mixed") else 8


def used_backend(rope: RotaryEmbedding, setting: Setting) -> str:
    """What ``"auto"`` comes to for the tensors that are measured."""
    x = torch.empty(0, device=setting.device, dtype=setting.dtype)
    return rope.chosen_backend(x, x, x.float()).backend


def colour_of(rival: str) -> str:
    """The method of ours that a rival is the like of."""
    return "rope-mixed" if "Mixed" in rival else "rope"


def name_of(method: str, backend: str = "auto", kind: str = "shared") -> str:
    """Of a row; the reference is named after what it is in the paper."""
    words = {"auto": "", "reference": "Algorithm 1"}.get(backend, backend)
    return ", ".join(word for word in (method, words, kind if kind != "shared" else "") if word)


def own_rotation(setting: Setting, method: str, backend: str) -> RotaryEmbedding:
    """The rotation of one ViT layer, the same angles for every backend."""
    torch.manual_seed(0)
    shape = shape_of(setting)
    rope = RotaryEmbedding(
        method,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        block_size=block_size_of(method),
        position_scale=setting.grid if method == "rope" else None,
        backend=backend,
        device=setting.device,
    )
    stir(rope)
    return rope


def llama_rotary(setting: Setting, method: str, backend: str) -> RotaryEmbedding:
    """As after some training from vanilla RoPE: every head has angles of its own."""
    rope = RotaryEmbedding(
        method,
        num_heads=setting.llama_key_heads,
        head_dim=setting.llama_head_dim,
        num_axes=1,
        block_size=block_size_of(method),
        init="rope",
        backend=backend,
        device=setting.device,
    )
    stir(rope)
    return rope


@torch.no_grad()
def stir(module: nn.Module) -> None:
    """Move all angles a little from where they start: some starts are zero, some like others."""
    for rope in rotary_modules(module).values():
        for parameter in rope.parameters():
            generator = torch.Generator(parameter.device).manual_seed(0)
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.add_((0.05 + 0.1 * parameter.abs()) * noise)


def llama_positions(setting: Setting) -> Tensor:
    """(T, 1)."""
    return torch.arange(setting.llama_tokens, device=setting.device)[:, None].float()
