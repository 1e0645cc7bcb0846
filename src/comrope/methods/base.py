"""The base class of all position encodings: sizes, initialization, angles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from comrope import _checks, inits
from comrope._dtypes import in_function_transform, is_traced
from comrope.angles import Angles
from comrope.inits import Init, Normal, PlaneInit, Zeros

__all__ = ["Method", "batched_angles", "skew_part"]

AXIS_ORDERS = ("alternating", "contiguous")


class _Kept(NamedTuple):
    """The angles of a method, and what they were computed from."""

    angles: Angles
    scaling: Callable[[Angles], Angles] | None
    parameters: dict[str, Tensor]

    def serves(self, scaling: Callable[[Angles], Angles] | None, now: dict[str, Tensor]) -> bool:
        """Return whether nothing changed. Values are compared: versions miss ``x.data.copy_()``."""
        return scaling == self.scaling and all(
            x.dtype == now[name].dtype and torch.equal(x, now[name])
            for name, x in self.parameters.items()
        )


def _can_keep(parameters: Iterable[Tensor]) -> bool:
    """Return whether angles can be kept: a GPU would wait for the comparison of parameters."""
    if torch.is_grad_enabled() or is_traced() or in_function_transform():
        return False
    return all(type(x) is nn.Parameter and x.device.type == "cpu" for x in parameters)


class Method(nn.Module):
    """A position encoding: parameters, and the angle matrices (N, H, m, b, b) that they define.

    A subclass sets ``name`` and ``head_axis``. It names its parameters in ``shapes``, fills them in
    ``init_normal`` and ``init_planes``, and computes the angles in ``angles_of``. The other class
    attributes describe what it can do; a subclass sets those that differ.
    """

    name: ClassVar[str]  # as in ``comrope.METHODS``
    label: ClassVar[str] = ""  # in tables and figures; by default the name
    head_axis: ClassVar[dict[str, int]] = {}  # parameter -> its dimension of the heads
    options: ClassVar[dict[str, Any]] = {}  # options of this method alone, with their defaults
    only_axes: ClassVar[int | None] = None  # the only possible number of axes; None: any number
    learns: ClassVar[bool] = True  # it has parameters
    starts_at_zero: ClassVar[bool] = True  # it can learn from init "zeros", which is no rotation
    commutes: ClassVar[bool] = True  # on several axes too; else new positions need exponentials
    axis_partitioned: ClassVar[bool] = False  # each block rotates with one axis
    direction_per_plane: ClassVar[bool] = True  # planes of a block can rotate with different axes
    block_size_matters: ClassVar[bool] = True  # else blocks only group the planes
    learns_frequencies: ClassVar[bool] = False  # directly, so that it can learn their logarithms

    # Defaults for pickles that are older than these attributes.
    shared_heads: bool = False
    log_frequencies: bool = False
    scaling: Callable[[Angles], Angles] | None = None  # while ``comrope.scaled`` is active
    _kept: _Kept | None = None

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
        rotated_share: float | None = None,
        axis_order: str = "alternating",
        shared_heads: bool = False,
        log_frequencies: bool = False,
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
        self.shared_heads = _checks.boolean("shared_heads", shared_heads)
        self.log_frequencies = _checks.boolean("log_frequencies", log_frequencies)
        self.init = self.parse_init(
            init,
            spread=spread,
            base=base,
            position_scale=position_scale,
            frequencies=frequencies,
            rotated_share=rotated_share,
        )
        self._check_options()
        self._check_sizes()
        for name, shape in self.parameter_shapes().items():
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
        heads = 1 if self.shared_heads else self.num_heads
        return inits.Shape(self.num_axes, heads, self.num_blocks, self.num_planes, self.axis_order)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters, if every head has its own."""
        raise NotImplementedError

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters: of one head with ``shared_heads``."""
        shapes = self.shapes()
        for name, shape in shapes.items():
            if name not in self.head_axis:
                raise TypeError(
                    f"head_axis: expected the dimension of the heads in {name!r} {shape}, a "
                    f"parameter of {type(self).__name__}; got {self.head_axis}"
                )
            if self.shared_heads:
                axis = self.head_axis[name]
                shapes[name] = (*shape[:axis], 1, *shape[axis + 1 :])
        return shapes

    def angles(self) -> Angles:
        """Return the angle matrices in the form of this method, in float32 or wider.

        On a CPU without gradients they are kept, with their spectrum, until a parameter changes.
        """
        parameters = {name: getattr(self, name) for name in self.shapes()}
        if not _can_keep(parameters.values()):
            return self._angles_of(parameters)
        kept = self._kept
        if kept is None or not kept.serves(self.scaling, parameters):
            with torch.inference_mode(False), torch.no_grad():
                angles = self._angles_of(parameters).cache_spectrum()
                copies = {name: x.detach().clone() for name, x in parameters.items()}
            kept = self._kept = _Kept(angles, self.scaling, copies)
        return kept.angles

    def _angles_of(self, parameters: dict[str, Tensor]) -> Angles:
        angles = self.angles_of(**parameters)
        return self._for_all_heads(angles if self.scaling is None else self.scaling(angles))

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
        elif isinstance(self.init, Zeros):
            self.init_zeros()
        else:
            raise TypeError(f"init: expected a Normal, PlaneInit or Zeros, got {self.init}")

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

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}

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

    def _for_all_heads(self, angles: Angles) -> Angles:
        return angles.expand_heads(self.num_heads) if self.shared_heads else angles

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        for option in options:
            if option not in self.options:
                own = ", ".join(self.options) or "none"
                raise TypeError(f"{option}: expected an option of method {self.name!r} ({own})")
        return options

    def _check_options(self) -> None:
        if self.shared_heads and not self.learns:
            raise ValueError(
                f"shared_heads: expected False, since method {self.name!r} has no parameters to "
                "share, got True"
            )
        if self.log_frequencies and not self.learns_frequencies:
            raise ValueError(
                f"log_frequencies: expected False, since method {self.name!r} does not learn "
                "frequencies directly, as 'rope-mixed' and 'comrope-torus' do; got True"
            )
        if self.log_frequencies and isinstance(self.init, Zeros):
            raise ValueError(
                "log_frequencies: expected False with init 'zeros', since zero has no logarithm; "
                "got True"
            )

    def _check_sizes(self) -> None:
        dim, size, axes = self.head_dim, self.block_size, self.num_axes
        if self.only_axes not in (None, axes):
            raise ValueError(
                f"num_axes: expected {self.only_axes}, as method {self.name!r} requires, got {axes}"
            )
        if isinstance(self.init, Zeros) and self.learns and not self.starts_at_zero:
            others = ", ".join(name for name in inits.NAMES if name != Zeros.name)
            raise ValueError(
                f"init: expected one of {others}, since method {self.name!r} cannot start at zero; "
                f"got {self.init.name!r}"
            )
        if self.init.mixes_axes and self.axis_partitioned:
            others = ", ".join(n for n, cls in inits.CLASSES.items() if not cls.mixes_axes)
            raise ValueError(
                f"init: {self.init.name!r} needs blocks that rotate with all axes, and each of "
                f"method {self.name!r} rotates with one; expected one of {others}"
            )
        if dim % size:
            raise ValueError(f"block_size: expected a divisor of head_dim {dim}, got {size}")
        if (self.axis_partitioned or self.init.shares_blocks) and self.num_blocks % axes:
            kind, name = "init", self.init.name
            if self.axis_partitioned:
                kind, name = "method", self.name
            raise ValueError(
                f"head_dim: {kind} {name!r} shares the blocks of a head among the axes, so "
                f"head_dim / block_size must be a multiple of num_axes {axes}; got {dim} / {size} "
                f"= {self.num_blocks}. Choose num_heads so that head_dim is a multiple of "
                f"{axes * size}, or another {kind}"
            )
        self.init.check(self.shape)


def batched_angles(
    methods: Sequence[Method], prepare: Callable[[Angles], Angles] | None = None
) -> list[Angles] | None:
    """Compute the angles of several layers at once, as if their heads were those of one layer.

    One large batch of small matrices is faster than many small batches.

    Args:
        methods: Of the layers.
        prepare: Applied to the angles of all layers; by default their spectrum is computed.

    Returns:
        The angles of each layer. None if the layers differ, are on several devices, or have sharded
        parameters.
    """
    if not methods or not all(_can_batch(methods[0], method) for method in methods):
        return None
    first, shapes = methods[0], methods[0].parameter_shapes()
    if not shapes:
        return [first.angles()] * len(methods)
    if _can_keep(first.parameters()):
        return [method.angles() for method in methods]
    parameters = {}
    for name in shapes:
        axis = first.head_axis[name]
        stacked = torch.stack([getattr(method, name) for method in methods], axis)
        parameters[name] = stacked.flatten(axis, axis + 1)
    angles = first.angles_of(**parameters)
    if first.scaling is not None:
        angles = first.scaling(angles)
    angles = angles.cache_spectrum() if prepare is None else prepare(angles)
    return [first._for_all_heads(part) for part in angles.split_layers(len(methods))]


def _can_batch(first: Method, method: Method) -> bool:
    """Return whether two layers can be stacked.

    A frozen layer and a trained one cannot: the frozen angles would get a gradient.
    """
    for of in (
        "name", "settings", "num_heads", "shape", "head_dim", "block_size", "init",
        "log_frequencies", "scaling",
    ):  # fmt: skip
        if getattr(first, of) != getattr(method, of):
            return False
    # nn.Module's own iterators would take longer than the rest of this function.
    devices = [
        [x.device for x in (*each._parameters.values(), *each._buffers.values()) if x is not None]
        for each in (first, method)
    ]
    for name, shape in method.parameter_shapes().items():
        mine, other = getattr(method, name), getattr(first, name)
        if type(mine) is not nn.Parameter or tuple(mine.shape) != shape:
            return False
        if mine.dtype != other.dtype or mine.requires_grad != other.requires_grad:
            return False
    return devices[0] == devices[1]


def skew_part(matrix: Tensor) -> Tensor:
    """Return P - P^T, the paper's map from any matrix to a skew-symmetric one."""
    return matrix - matrix.mT
