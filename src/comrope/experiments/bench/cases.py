"""Sizes that the benchmarks measure, and comrope's rotations for these sizes.

Shapes: B batch, T tokens, N axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comrope import positions as coordinates
from comrope.analysis import rotary_modules
from comrope.methods import has_vanilla_frequencies, method_class
from comrope.models.registry import SIZES
from comrope.rotary import RotaryEmbedding

__all__ = [
    "Setting",
    "Shape",
    "block_size_of",
    "color_method",
    "llama_positions",
    "llama_rotary",
    "llama_shape",
    "name_of",
    "own_rotation",
    "perturb_angles",
    "shape_of",
    "token_positions",
    "used_backend",
]


@dataclass(frozen=True)
class Setting:
    """The sizes, device and dtype of a benchmark."""

    device: torch.device
    dtype: torch.dtype
    rounds: int
    compile: bool
    batch: int
    size: str  # of the ViT and the attention layer: a key of comrope.models.registry.SIZES
    depth: int  # of the ViT
    grid: tuple[int, int]  # patches of 16 pixels
    llama_tokens: int
    llama_heads: int
    llama_key_heads: int
    llama_head_dim: int
    language: dict[str, int]  # sizes of the language model, by the names of its configuration
    gpt: dict[str, Any]  # of comrope's: "name", "depth", "vocab_size", "context" and "batch"
    copied_mib: int  # memory copied by the reference row of rotations, larger than caches
    runs: int = 1  # repetitions of all rounds, each with its own medians and ratios

    @property
    def modes(self) -> tuple[bool, ...]:
        """Values of ``compiled``: False for eager, and True if ``compile``."""
        return (False, True) if self.compile else (False,)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Shape(NamedTuple):
    """The attention layer that a rival is built for; an empty ``grid`` is a sequence."""

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
    """Return the shape of an attention layer of the measured ViT."""
    size, (rows, columns) = SIZES[setting.size], setting.grid
    heads = size["num_heads"]
    dim = size["embed_dim"] // heads
    return Shape(1 + rows * columns, heads, dim, setting.grid, setting.device, setting.dtype)


def llama_shape(setting: Setting) -> Shape:
    tokens, heads, dim = setting.llama_tokens, setting.llama_heads, setting.llama_head_dim
    return Shape(tokens, heads, dim, (), setting.device, setting.dtype)


def token_positions(setting: Setting, per_sample: bool = False) -> Tensor:
    """Return patch centres and the class token: (T, N), or perturbed per sample, (B, T, N)."""
    place = coordinates.grid(setting.grid, device=setting.device)
    if per_sample:
        patch = [1 / size for size in setting.grid]
        place = coordinates.perturb(place, patch, 1.0, batch_size=setting.batch)
    return coordinates.with_class_token(place)


def block_size_of(method: str) -> int:
    return 8 if method_class(method).block_size_matters else 2


def used_backend(rope: RotaryEmbedding, setting: Setting) -> str:
    """Return the backend that ``"auto"`` selects for the measured tensors."""
    x = torch.empty(0, device=setting.device, dtype=setting.dtype)
    return rope.select_backend(x, x, x.float()).backend


def color_method(rival: str) -> str:
    """Return the method whose color a rival gets in figures."""
    return "rope-mixed" if "Mixed" in rival else "rope"


def name_of(method: str, backend: str = "auto", kind: str = "shared") -> str:
    """Return the name of a row; the reference implementation is the paper's Algorithm 1."""
    words = {"auto": "", "reference": "Algorithm 1"}.get(backend, backend)
    return ", ".join(word for word in (method, words, kind if kind != "shared" else "") if word)


def own_rotation(setting: Setting, method: str, backend: str) -> RotaryEmbedding:
    """Return the rotation of one ViT layer, with the same angles for every backend."""
    torch.manual_seed(0)
    shape = shape_of(setting)
    rope = RotaryEmbedding(
        method,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        block_size=block_size_of(method),
        position_scale=setting.grid if has_vanilla_frequencies(method, "normal") else None,
        backend=backend,
        device=setting.device,
    )
    perturb_angles(rope)
    return rope


def llama_rotary(setting: Setting, method: str, backend: str) -> RotaryEmbedding:
    """Return a rotation that starts as vanilla RoPE, with noise as after some training."""
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
    perturb_angles(rope)
    return rope


@torch.no_grad()
def perturb_angles(module: nn.Module) -> None:
    """Add small noise to all angles, because some initializations are zero or equal."""
    for rope in rotary_modules(module).values():
        for parameter in rope.parameters():
            generator = torch.Generator(parameter.device).manual_seed(0)
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.add_((0.05 + 0.1 * parameter.abs()) * noise)


def llama_positions(setting: Setting) -> Tensor:
    """Return the positions (T, 1) of a sequence."""
    return torch.arange(setting.llama_tokens, device=setting.device)[:, None].float()
