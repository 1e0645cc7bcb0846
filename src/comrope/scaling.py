"""Scalings of trained rotations, for evaluation on longer inputs than those of training.

``with comrope.scaled(model, comrope.scaling.YaRN(4.0, original_length=1024)): ...``

A scaling divides the frequencies of every plane by a factor: all by the same (``Linear``), or by
another for every plane (``NTK``, ``YaRN``). For vanilla RoPE on one axis these are the formulas of
their authors. For any other frequencies, learned ones for example, the formulas are functions of
the frequency instead of the index of a channel. If all axes have one factor, every plane keeps its
direction.

Shapes: N axes, H heads, m blocks per head, f planes per block.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from comrope import _checks
from comrope._dtypes import constants_like
from comrope.analysis import rotary_modules
from comrope.angles import Angles, CollinearAngles, CommutingAngles, GeneralAngles, block_size_of
from comrope.rotary import RotaryEmbedding

__all__ = ["NTK", "Linear", "Scaling", "YaRN", "scaled"]

Model = TypeVar("Model", bound=nn.Module)
Numbers = float | Sequence[float]
EQUAL = 1e-4  # speeds of planes count as equal if their logarithms differ by less


@dataclass(frozen=True)
class Scaling:
    """Base class. Objects are functions from angles to scaled angles.

    Args:
        factor: How much longer inputs are than those of training: one number or one per axis.
    """

    factor: Numbers

    def __post_init__(self) -> None:
        self._check_numbers("factor")

    def attention_scaling(self, num_axes: int) -> float:
        """Return the factor of rotated queries and keys."""
        return 1.0

    def check(self, rope: RotaryEmbedding) -> None:
        """Raise ValueError unless this rotation can be scaled."""
        _checks.per_axis("factor", self.factor, rope.num_axes)

    def __call__(self, angles: Angles) -> Angles:
        """Return the scaled angles."""
        raise NotImplementedError

    def _check_numbers(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, Iterable) and not isinstance(value, str):
            value = tuple(_checks.real(name, each, positive=True) for each in value)
        else:
            value = _checks.real(name, value, positive=True)
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: divide every frequency by the factor (Chen et al., arXiv 2306.15595).

    The same as positions divided by it; ``"linear"`` in transformers.
    """

    def __call__(self, angles: Angles) -> Angles:
        if isinstance(angles, CommutingAngles):
            return angles._replace(frequencies=_divide(angles.frequencies, self.factor))
        if isinstance(angles, CollinearAngles):
            return angles._replace(direction=_divide(angles.direction, self.factor))
        return GeneralAngles(_divide(angles.skew, self.factor))


@dataclass(frozen=True)
class PlaneScaling(Scaling):
    """Base class of scalings with another factor for every plane.

    Such factors need planes, so LieRE on several axes has none. They are constants for the
    gradient.
    """

    def check(self, rope: RotaryEmbedding) -> None:
        super().check(rope)
        if rope.num_axes > 1 and not rope.method.commutes:
            raise ValueError(
                f"scaling: {type(self).__name__} needs the planes of a rotation, and method "
                f"{rope.name!r} on {rope.num_axes} axes has none; expected Linear"
            )

    def multipliers(self, frequencies: Tensor) -> Tensor:
        """Return the factors (N or 1, H, m, f) of frequencies (N, H, m, f)."""
        raise NotImplementedError

    def __call__(self, angles: Angles) -> Angles:
        if isinstance(angles, CollinearAngles) and block_size_of(angles) > 2:
            learns = angles.skew.requires_grad or angles.direction.requires_grad
            if learns and torch.is_grad_enabled():
                raise ValueError(
                    f"scaling: {type(self).__name__} has no gradient for angle matrices that are "
                    "multiples of one, as those of 'comrope-ld' and 'comrope-ap'; expected "
                    "torch.no_grad(), angles with requires_grad_(False), or a folded model"
                )
            angles = CommutingAngles(*angles.spectrum(), block_size_of(angles))
        elif isinstance(angles, CollinearAngles):
            angles = angles.as_commuting()
        assert isinstance(angles, CommutingAngles)  # by ``check``
        with torch.no_grad():
            factors = self.multipliers(angles.frequencies)
        return angles._replace(frequencies=angles.frequencies * factors)


@dataclass(frozen=True)
class NTK(PlaneScaling):
    """NTK-aware scaling: divide the slowest plane of a head by the factor, the fastest not at all.

    In between, a plane of speed w is divided by factor^t, t = log(w_max / w) / log(w_max / w_min).
    For vanilla RoPE on one axis this is the base times factor^(D / (D - 2)), as bloc97 proposed
    (arXiv 2309.00071) and ``"dynamic"`` in transformers computes for one length.

    The speed on several axes is sum_i |w_i| / max |w_i|, with the maximum over the planes of the
    head. Planes that do not rotate do not count as the slowest. If all planes of a head are equally
    fast, all are divided by the factor.
    """

    def multipliers(self, frequencies: Tensor) -> Tensor:
        speeds = frequencies.abs()
        fastest = speeds.amax((-2, -1), keepdim=True)
        speed = (speeds / torch.where(fastest > 0, fastest, 1.0)).sum(0)
        rotates = speed > 0
        log = torch.where(rotates, speed, 1.0).log()
        highest = torch.where(rotates, log, -math.inf).amax((-2, -1), keepdim=True)
        lowest = torch.where(rotates, log, math.inf).amin((-2, -1), keepdim=True)
        equal = highest - lowest < EQUAL
        share = torch.where(equal, 1.0, (highest - log) / torch.where(equal, 1.0, highest - lowest))
        return _per_axis(self.factor, frequencies) ** -torch.where(rotates, share, 1.0)


@dataclass(frozen=True)
class YaRN(PlaneScaling):
    """YaRN (Peng et al., arXiv 2309.00071): divide slow planes by the factor, keep fast ones.

    Args:
        factor: As in ``Scaling``.
        original_length: Length of the inputs of training, in units of the positions: one number or
            one per axis.
        beta_fast: Planes that turn more often over the original length keep their frequencies.
        beta_slow: Planes that turn less often are divided by the factor.
        attention_factor: Factor of rotated queries and keys, so that scores are multiplied by its
            square; by default 0.1 ln(factor) + 1, with the product of the factors of all axes, and
            1 if that is below 1.

    Between the two the weight of the kept frequency grows with the logarithm of the number of
    turns, as in transformers with ``truncate=False``. (By default transformers rounds the ends of
    this ramp to whole channels. In the text of the paper it is linear in the number of turns.) On
    several axes the number of turns is sum_i |w_i| length_i / 2 pi, that between opposite corners.
    """

    original_length: Numbers
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_numbers("original_length")
        _checks.real("beta_slow", self.beta_slow, positive=True)
        if _checks.real("beta_fast", self.beta_fast, positive=True) <= self.beta_slow:
            raise ValueError(
                f"beta_fast: expected more than beta_slow {self.beta_slow}, got {self.beta_fast}"
            )
        if self.attention_factor is not None:
            _checks.real("attention_factor", self.attention_factor, positive=True)

    def attention_scaling(self, num_axes: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        longer = math.prod(_checks.per_axis("factor", self.factor, num_axes))
        return max(1.0, 0.1 * math.log(longer) + 1.0)

    def check(self, rope: RotaryEmbedding) -> None:
        super().check(rope)
        _checks.per_axis("original_length", self.original_length, rope.num_axes)

    def multipliers(self, frequencies: Tensor) -> Tensor:
        lengths = _per_axis(self.original_length, frequencies)
        turns = (frequencies.abs() * lengths).sum(0) / (2 * math.pi)
        range_of_logs = math.log(self.beta_fast / self.beta_slow)
        kept = ((turns.log() - math.log(self.beta_slow)) / range_of_logs).clamp(0, 1)
        return kept + (1 - kept) / _per_axis(self.factor, frequencies)


@contextlib.contextmanager
def scaled(model: Model, scaling: Scaling) -> Iterator[Model]:
    """Scale every rotation of a model inside a ``with`` block.

    Args:
        model: Any model that contains a ``RotaryEmbedding``: ours, a swapped one, your own, or a
            ``RotaryEmbedding`` itself; also compiled, which compiles it anew.
        scaling: A ``Linear``, ``NTK`` or ``YaRN``.

    Yields:
        The model.

    Raises:
        TypeError: ``scaling`` is not a scaling.
        ValueError: The model has no rotation, is scaled already, or a rotation cannot be scaled so.
            The model is unchanged.

    Parameters and state dicts do not change. Angles that were computed outside of the block, and
    keys in a cache, are not scaled. A copy that is made inside stays scaled; ``comrope.fold``
    refuses to work inside.
    """
    if not isinstance(scaling, Scaling):
        raise TypeError(
            f"scaling: expected Linear, NTK or YaRN of comrope.scaling, got {scaling!r}"
        )
    rotations = rotary_modules(model)
    if not rotations:
        raise ValueError(f"model: {type(model).__name__} has no RotaryEmbedding to scale")
    for name, rope in rotations.items():
        if rope.method.scaling is not None:
            raise ValueError(
                f"model: {name or type(rope).__name__} is scaled already, by "
                f"{rope.method.scaling}; expected a model that is not"
            )
        scaling.check(rope)
    values: dict[tuple[nn.Module, str], Any] = {}
    for rope in rotations.values():
        factor = rope.attention_scaling * scaling.attention_scaling(rope.num_axes)
        values |= {(rope.method, "scaling"): scaling, (rope, "attention_scaling"): factor}
    before = {key: vars(key[0])[key[1]] for key in values if key[1] in vars(key[0])}
    try:
        for (module, name), value in values.items():
            setattr(module, name, value)
        yield model
    finally:
        for module, name in values:
            if (module, name) in before:
                setattr(module, name, before[module, name])
            else:
                delattr(module, name)


def _per_axis(values: Numbers, like: Tensor) -> Tensor | float:
    """Return one number, or a tensor (N, 1, ..., 1) with the dimensions of ``like`` (N, ...)."""
    if not isinstance(values, tuple):
        return values  # type: ignore[return-value]
    return constants_like(values, like).view(-1, *[1] * (like.ndim - 1))


def _divide(x: Tensor, factor: Numbers) -> Tensor:
    return x / _per_axis(factor, x)
