"""The base class of all position encodings: sizes, initialization, angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comrope import _checks, inits
from comrope.angles import Angles
from comrope.inits import Init, Normal, PlaneInit

__all__ = ["Method", "batched_angles", "has_vanilla_frequencies", "skew_part"]

AXIS_ORDERS = ("alternating", "contiguous")


class Method(nn.Module):
    """A position encoding: parameters, and the angle matrices (N, H, m, b, b) that they define.

    A subclass names its parameters in ``shapes``, fills them in ``init_normal`` and
    ``init_planes``, and computes the angles in ``angles_of``.
    """

    name: str
    label: str  # in tables and figures
    options: ClassVar[dict[str, Any]] = {}  # options of this method alone, with their defaults
    axis_partitioned = False  # each block rotates with one axis, so the axes share the blocks
    head_axis: ClassVar[dict[str, int]] = {"P": 0, "theta": 1, "frequencies": 1}

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_axes: int = 2,
        block_size: int = 8,
        init: str | Init = "normal",
        spread: float = 1.0,
        base: float | None = None,
        position_scale: float | Sequence[float] | None = None,
        frequencies: Sequence[float] | None = None,
        axis_order: str = "alternating",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = {**self.options, **self._checked(options)}
        self.num_heads = _checks.integer("num_heads", num_heads, 1)
        self.head_dim = _checks.integer("head_dim", head_dim, 2)
        self.num_axes = _checks.integer("num_axes", num_axes, 1)
        self.block_size = _checks.integer("block_size", block_size, 2)
        self.axis_order = _checks.one_of("axis_order", axis_order, AXIS_ORDERS)
        self.num_blocks, self.num_planes = head_dim // block_size, block_size // 2
        self.init = self.parse_init(
            init,
            spread=spread,
            base=base,
            position_scale=position_scale,
            frequencies=frequencies,
        )
        self._check_sizes()
        for name, shape in self.shapes().items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    @classmethod
    def parse_init(cls, init: str | Init, **keywords: Any) -> Init:
        """Return the initialization of this method; see ``comrope.inits.parse``."""
        return inits.parse(init, **keywords)

    @property
    def shape(self) -> inits.Shape:
        """The planes of this method, as an initialization fills them."""
        return inits.Shape(
            self.num_axes, self.num_heads, self.num_blocks, self.num_planes, self.axis_order
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters."""
        raise NotImplementedError

    def angles(self) -> Angles:
        """Return the angle matrices in the form of this method, in float32 or wider."""
        return self.angles_of(**{name: getattr(self, name) for name in self.shapes()})

    def angles_of(self, **parameters: Tensor) -> Angles:
        """Return the angle matrices of other parameters, which may have any number of heads."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters anew."""
        if isinstance(self.init, Normal):
            self.init_normal(self.init.std)
        elif isinstance(self.init, PlaneInit):
            self.init_planes(self.init)
        else:
            self.init_zeros()

    def init_normal(self, std: float) -> None:
        """Draw the parameters, with ``std`` times the method's own standard deviation."""
        raise NotImplementedError

    def init_planes(self, init: PlaneInit) -> None:
        """Set the parameters to the frequencies of ``init``."""
        raise NotImplementedError

    def init_zeros(self) -> None:
        """Set the parameters so that the rotation is the identity and gradients are not zero."""
        for parameter in self.parameters():
            parameter.zero_()

    def extra_repr(self) -> str:
        order = "" if self.axis_order == "alternating" else f", axis_order={self.axis_order!r}"
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_axes={self.num_axes}, "
            f"block_size={self.block_size}, init={self.init}{order}"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load pickles of version 0.1, which have a name instead of the initialization."""
        super().__setstate__(state)
        if isinstance(self.init, str):
            keywords = {"spread": self.spread}
            if self.is_vanilla:
                keywords |= {"base": self.base, "position_scale": self.position_scale}
                keywords["frequencies"] = self.given_frequencies
            name = inits.RENAMED.get(self.init, self.init)
            self.init = self.parse_init(name, **keywords)

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        for option in options:
            if option not in self.options:
                own = ", ".join(self.options) or "none"
                raise TypeError(f"{option}: expected an option of method {self.name!r} ({own})")
        return options

    def _check_sizes(self) -> None:
        dim, size, axes = self.head_dim, self.block_size, self.num_axes
        if self.init.mixes_axes and self.axis_partitioned:
            raise ValueError(
                f"init: {self.init.name!r} needs blocks that rotate with all axes, and each of "
                f"method {self.name!r} rotates with one; expected normal, zeros or rope"
            )
        if dim % size:
            raise ValueError(f"block_size: expected a divisor of head_dim {dim}, got {size}")
        if (self.axis_partitioned or self.init.shares_blocks) and self.num_blocks % axes:
            what = f"method {self.name!r}" if self.axis_partitioned else f"init {self.init.name!r}"
            raise ValueError(
                f"head_dim: {what} shares the blocks of a head among the axes, so head_dim / "
                f"block_size must be a multiple of num_axes {axes}; got {dim} / {size} = "
                f"{self.num_blocks}. Choose num_heads so that head_dim is a multiple of "
                f"{axes * size}, or 'comrope-ld', 'comrope-torus'"
            )
        self.init.check(self.shape)


def batched_angles(methods: Sequence[Method]) -> list[Angles] | None:
    """Compute the angles of several layers at once, as if their heads were those of one layer.

    On a GPU one large batch of small matrices is faster than many small batches.

    Returns:
        The angles of each layer. None if the layers differ, are on several devices, or have sharded
        parameters.
    """
    if not methods or not all(_can_batch(methods[0], method) for method in methods):
        return None
    first, shapes = methods[0], methods[0].shapes()
    if not shapes:
        return [first.angles()] * len(methods)
    parameters = {}
    for name in shapes:
        axis = first.head_axis[name]
        stacked = torch.stack([getattr(method, name) for method in methods], axis)
        parameters[name] = stacked.flatten(axis, axis + 1)
    angles = first.angles_of(**parameters).cache_spectrum()
    return list(angles.split_layers(len(methods)))


def _can_batch(first: Method, method: Method) -> bool:
    """Return whether two layers can be stacked.

    A frozen layer and a trained one cannot: the frozen angles would get a gradient.
    """
    for of in ("name", "settings", "shape", "head_dim", "block_size", "init"):
        if getattr(first, of) != getattr(method, of):
            return False
    # nn.Module's own iterators would take longer than the rest of this function.
    devices = [
        [x.device for x in (*each._parameters.values(), *each._buffers.values()) if x is not None]
        for each in (first, method)
    ]
    for name, shape in method.shapes().items():
        mine, other = getattr(method, name), getattr(first, name)
        if type(mine) is not nn.Parameter or tuple(mine.shape) != shape:
            return False
        if mine.dtype != other.dtype or mine.requires_grad != other.requires_grad:
            return False
    return devices[0] == devices[1]


def has_vanilla_frequencies(method: str, init: str | Init) -> bool:
    """Return whether frequencies start as those of vanilla RoPE, per patch or token."""
    return method == "rope" or isinstance(inits.parse(init), PlaneInit)


def skew_part(matrix: Tensor) -> Tensor:
    """Return P - P^T, the paper's map from any matrix to a skew-symmetric one."""
    return matrix - matrix.mT
