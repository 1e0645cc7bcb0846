"""Initializations of learned rotations, the values of ``RotaryEmbedding(init=...)``.

``RotaryEmbedding("comrope-ld", init=comrope.inits.RoPE(base=100, position_scale=(14, 14)), ...)``.
A name in ``NAMES`` stands for an object with default fields. To add an initialization, add a class
here, to ``CLASSES`` and to ``__all__``.

Shapes: N axes, H heads, m blocks per head, f planes per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from comrope import _checks
from comrope._deprecated import warn_deprecated
from comrope._dtypes import constants_like

__all__ = [
    "CLASSES",
    "NAMES",
    "RENAMED",
    "Init",
    "Isotropic",
    "Normal",
    "PlaneFrequencies",
    "PlaneInit",
    "RandomAxes",
    "RoPE",
    "Shape",
    "Zeros",
    "axis_of_block",
    "parse",
    "rope_frequencies",
]

BASE = 10000.0


class Shape(NamedTuple):
    """The planes of a method."""

    num_axes: int
    num_heads: int
    num_blocks: int  # per head
    num_planes: int  # per block
    axis_order: str = "alternating"


class PlaneFrequencies(NamedTuple):
    """Frequencies ``direction * speed``, (N, H, m, f)."""

    direction: Tensor  # (N, H or 1, m, f or 1), of length ``unit``
    speed: Tensor  # (H or 1, m, f)
    unit: float = 1.0


@dataclass(frozen=True)
class Init:
    """Base class. An initialization draws from torch's global generator."""

    name: ClassVar[str]
    mixes_axes: ClassVar[bool] = False  # blocks rotate with all axes at once
    shares_blocks: ClassVar[bool] = False  # the axes share the blocks of a head evenly

    def check(self, shape: Shape) -> None:
        """Raise ValueError if the fields do not fit a method of this shape."""


@dataclass(frozen=True)
class Normal(Init):
    """Random frequencies around zero: the method's own initialization, for positions in [0, 1].

    Args:
        std: Multiplies the standard deviation of the method. (RoPE-Mixed's is that of blocks of
            two: 2.65 gives it that of blocks of eight.)
    """

    name: ClassVar[str] = "normal"
    std: float = 1.0

    def __post_init__(self) -> None:
        _checks.real("std", self.std, positive=True)


@dataclass(frozen=True)
class Zeros(Init):
    """No rotation, so standard attention."""

    name: ClassVar[str] = "zeros"


@dataclass(frozen=True)
class PlaneInit(Init):
    """Base class of initializations that give every plane a direction and a speed.

    Args:
        base: Frequencies are between 1 / ``base`` and 1; 10000 by default.
        position_scale: Multiplies all frequencies, one number or one per axis, 1 by default. The
            default suits positions that count patches. For positions in [0, 1] pass the grid of
            the training resolution.
    """

    base: float = BASE
    position_scale: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        _checks.real("base", self.base, positive=True)
        if isinstance(self.position_scale, Iterable) and not isinstance(self.position_scale, str):
            object.__setattr__(self, "position_scale", tuple(self.position_scale))

    def check(self, shape: Shape) -> None:
        _checks.per_axis("position_scale", self.position_scale, shape.num_axes, positive=True)

    def scale_of_axes(self, num_axes: int) -> tuple[float, ...]:
        """Return ``position_scale`` for every axis."""
        scale = self.position_scale
        return scale if isinstance(scale, tuple) else (scale,) * num_axes  # type: ignore[return-value]

    def planes(self, shape: Shape, like: Tensor) -> PlaneFrequencies:
        """Draw the frequencies of every plane, on the device of ``like``."""
        raise NotImplementedError

    def blocks(self, shape: Shape, like: Tensor, direction_heads: int) -> PlaneFrequencies:
        """Draw frequencies of which all planes of a block have one direction.

        Args:
            shape: Of the speeds.
            like: A tensor on the device of the result.
            direction_heads: Heads that have directions of their own: all, or 1.
        """
        return self.planes(shape._replace(num_heads=direction_heads), like)


@dataclass(frozen=True)
class RoPE(PlaneInit):
    """Vanilla RoPE: every block rotates with one axis, in all heads alike.

    Args:
        base: As in ``PlaneInit``.
        position_scale: As in ``PlaneInit``.
        frequencies: Frequencies instead of those of ``base``, one per plane of an axis: for
            example those of a pre-trained model.
        rotated_share: Share p of the planes of an axis that rotate, those with the highest
            frequencies: p-RoPE (Barbero et al., arXiv 2410.06205; "proportional" in transformers).
            The others start with the frequency zero. 1 is RoPE, 0 is no rotation.

    The frequencies that p-RoPE keeps are those of RoPE. GPT-NeoX's partial rotary embedding instead
    spaces the frequencies of the rotated channels anew, from 1 to about 1 / ``base``: give these
    and zeros as ``frequencies``.
    """

    name: ClassVar[str] = "rope"
    shares_blocks: ClassVar[bool] = True
    frequencies: Sequence[float] | None = field(default=None, repr=False)
    rotated_share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if _checks.real("rotated_share", self.rotated_share) > 1:
            raise ValueError(
                f"rotated_share: expected a number from 0 to 1, got {self.rotated_share}"
            )
        if self.frequencies is not None:
            if self.base != BASE:
                raise ValueError(
                    f"base: expected no value with frequencies, which replace it, got {self.base}"
                )
            given = tuple(_checks.real("frequencies", f) for f in self.frequencies)
            object.__setattr__(self, "frequencies", given)

    def check(self, shape: Shape) -> None:
        super().check(shape)
        planes = shape.num_blocks // shape.num_axes * shape.num_planes
        if self.frequencies is not None and len(self.frequencies) != planes:
            raise ValueError(
                f"frequencies: expected {planes}, one per plane of an axis, "
                f"got {len(self.frequencies)}"
            )

    def rope_frequencies(
        self, shape: Shape, device: torch.device, *, scaled: bool = True
    ) -> Tensor:
        """Return the frequencies (N, m, f) in float64."""
        scale = self.scale_of_axes(shape.num_axes) if scaled else None
        return rope_frequencies(
            shape,
            base=self.base,
            frequencies=self.frequencies,
            rotated_share=self.rotated_share,
            position_scale=scale,
            device=device,
        )

    def planes(self, shape: Shape, like: Tensor) -> PlaneFrequencies:
        speed = self.rope_frequencies(shape, like.device).sum(0)
        return PlaneFrequencies(axis_of_block(shape, like.device)[:, None, :, None], speed[None])


@dataclass(frozen=True)
class RandomAxes(RoPE):
    """Vanilla RoPE with axes rotated at random in every head, so that no direction is special.

    On two axes with base 10 this is the initialization of RoPE-Mixed's authors. The fields are
    those of ``RoPE``.
    """

    name: ClassVar[str] = "rope-random-axes"
    mixes_axes: ClassVar[bool] = True

    def planes(self, shape: Shape, like: Tensor) -> PlaneFrequencies:
        speed = self.rope_frequencies(shape, like.device, scaled=False).sum(0)
        axes = shape.num_axes
        empty = like.new_empty(shape.num_heads, axes, axes, dtype=torch.float64)
        frames = torch.stack([nn.init.orthogonal_(frame) for frame in empty])  # columns: new axes
        own = axis_of_block(shape, like.device).double()
        scale = self.scale_of_axes(axes)
        mixed = torch.einsum("hij,jm->ihm", frames, own)
        direction = constants_like(scale, own)[:, None, None] * mixed
        return PlaneFrequencies(direction[..., None], speed[None], max(scale))


@dataclass(frozen=True)
class Isotropic(PlaneInit):
    """A random direction for every plane, with log-uniform speeds in [1 / base, 1].

    In ``comrope-ld`` the planes of a block share one direction.
    """

    name: ClassVar[str] = "isotropic"
    mixes_axes: ClassVar[bool] = True

    def planes(self, shape: Shape, like: Tensor) -> PlaneFrequencies:
        return self._draw(shape, like, per_block=False)

    def blocks(self, shape: Shape, like: Tensor, direction_heads: int) -> PlaneFrequencies:
        directions = shape._replace(num_heads=direction_heads)
        drawn = self._draw(directions, like, per_block=True)
        return drawn._replace(speed=self._draw(shape, like, per_block=False).speed)

    def _draw(self, shape: Shape, like: Tensor, *, per_block: bool) -> PlaneFrequencies:
        planes = (shape.num_heads, shape.num_blocks, shape.num_planes)
        directed = (*planes[:2], 1) if per_block else planes
        drawn = like.new_empty(shape.num_axes, *directed).normal_()
        direction = nn.functional.normalize(drawn, dim=0)
        scale = self.scale_of_axes(shape.num_axes)
        direction = constants_like(scale, direction)[:, None, None, None] * direction
        speed = self.base ** -like.new_empty(planes).uniform_()
        return PlaneFrequencies(direction, speed, max(scale))


CLASSES: dict[str, type[Init]] = {
    cls.name: cls for cls in (Normal, Zeros, RoPE, RandomAxes, Isotropic)
}
NAMES: tuple[str, ...] = tuple(CLASSES)
RENAMED = {"turned": "rope-random-axes", "scattered": "isotropic"}
_FIELDS = {"spread": "std"}  # where a keyword of RotaryEmbedding has another name than the field


def parse(init: str | Init, **keywords: Any) -> Init:
    """Return the initialization that a name or an object stands for.

    Args:
        init: One of ``NAMES``, or an initialization.
        keywords: ``spread`` (the ``std`` of ``Normal``), ``base``, ``position_scale``,
            ``frequencies`` and ``rotated_share``. They replace defaults of ``init``; None is
            ignored.

    Raises:
        ValueError: If the name is unknown, or a keyword is given that the initialization does not
            have or has set already.
    """
    if isinstance(init, str) and init in RENAMED:
        warn_deprecated(f"init={init!r}", f"init={RENAMED[init]!r}", stacklevel=7)
        init = RENAMED[init]
    if not isinstance(init, Init):
        init = CLASSES[_checks.one_of("init", init, NAMES)]()
    defaults = {each.name: each.default for each in fields(init)}
    given = {}
    for keyword, value in keywords.items():
        name = _FIELDS.get(keyword, keyword)
        if value is None or (keyword == "spread" and value == 1):
            continue
        if name not in defaults:
            having = [other for other, cls in CLASSES.items() if name in cls.__dataclass_fields__]
            raise ValueError(
                f"{keyword}: expected none with init {init.name!r}, got {value!r}; the "
                f"initializations that have one are {', '.join(having)}"
            )
        if getattr(init, name) != defaults[name]:
            raise ValueError(f"{keyword}: expected none with init={init}, got {value!r}")
        if name == "std":
            _checks.real(keyword, value, positive=True)
        given[name] = value
    return replace(init, **given)


def axis_of_block(shape: Shape, device: torch.device | None = None) -> Tensor:
    """Return (N, m), 1 where a block rotates with an axis in vanilla RoPE and ``comrope-ap``.

    Block j rotates with axis j mod N, or with ``axis_order="contiguous"`` all blocks of axis 0 come
    first, then those of axis 1, and so on.
    """
    axes = torch.arange(shape.num_axes, device=device)
    blocks = torch.arange(shape.num_blocks, device=device)
    alternating = shape.axis_order == "alternating"
    own = blocks % shape.num_axes if alternating else blocks * shape.num_axes // shape.num_blocks
    return (own == axes[:, None]).float()


def rope_frequencies(
    shape: Shape,
    *,
    base: float = BASE,
    frequencies: Sequence[float] | None = None,
    rotated_share: float = 1.0,
    position_scale: Sequence[float] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return vanilla RoPE's frequencies (N, m, f) in float64, zero outside a block's own axis.

    The planes of one axis, in order, have the frequencies base^0, base^(-1/P), ...,
    base^(-(P-1)/P), with P planes per axis: for one axis those of RoFormer. ``frequencies``
    replaces them. With ``rotated_share`` p, all but the floor(p P) highest are zero. Blocks larger
    than two keep the planes of an axis together, which is the same encoding with its channels
    permuted.
    """
    planes = shape.num_blocks // shape.num_axes * shape.num_planes
    if frequencies is None:
        exponents = torch.arange(planes, device=device, dtype=torch.float64) / max(planes, 1)
        one_axis = base**-exponents
    else:
        # No synchronization with a GPU here: every forward pass of vanilla RoPE computes this.
        one_axis = constants_like(frequencies, torch.empty(0, device=device, dtype=torch.float64))
    if rotated_share < 1:
        slowest = one_axis.argsort(descending=True, stable=True)[int(rotated_share * planes) :]
        one_axis = one_axis.index_fill(0, slowest, 0.0)
    one_axis = one_axis.view(shape.num_blocks // shape.num_axes, shape.num_planes)
    axes_dim = 1 if shape.axis_order == "alternating" else 0
    every = torch.stack([one_axis] * shape.num_axes, axes_dim).flatten(0, 1)
    own = axis_of_block(shape, device)[..., None]
    scales = position_scale or (1.0,) * shape.num_axes
    return torch.stack([mine * every * scale for mine, scale in zip(own, scales, strict=True)])
