"""What every position encoding shares: its sizes, its start, and the angles it hands on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comrope import _checks
from comrope._dtypes import constants_like
from comrope.angles import Angles, plane_generators

__all__ = [
    "INITS",
    "Method",
    "axis_of_block",
    "batched_angles",
    "has_vanilla_frequencies",
    "rope_frequencies",
    "skew_part",
]

INITS = ("normal", "zeros", "rope", "turned", "scattered")
AXIS_ORDERS = ("alternating", "contiguous")


class Method(nn.Module):
    """A position encoding: parameters, and the angle matrices (N, H, m, b, b) they stand for.

    Subclasses name their parameters in ``shapes``, fill them in ``reset_parameters`` and say in
    ``angles_of`` what they mean.
    """

    name: str
    options: ClassVar[dict[str, Any]] = {}  # what this method alone takes, with its defaults
    axis_partitioned = False  # each block turns with one axis, so the axes must share the blocks
    head_axis: ClassVar[dict[str, int]] = {"P": 0, "theta": 1, "frequencies": 1}

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_axes: int = 2,
        block_size: int = 8,
        init: str = "normal",
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
        self.settings = {**self.options, **self._known(options)}
        self.num_heads = _checks.integer("num_heads", num_heads, 1)
        self.head_dim = _checks.integer("head_dim", head_dim, 2)
        self.num_axes = _checks.integer("num_axes", num_axes, 1)
        self.block_size = _checks.integer("block_size", block_size, 2)
        self.init = _checks.one_of("init", init, INITS)
        self.spread = _checks.real("spread", spread, positive=True)
        if self.spread != 1 and (init != "normal" or self.name == "rope"):
            raise ValueError(
                f"spread: expected 1 of method {self.name!r} with init {init!r}, since only init "
                f"'normal' of learned angles is drawn with one to to_compute_dtype; got {spread!r}"
            )
        self.axis_order = _checks.one_of("axis_order", axis_order, AXIS_ORDERS)
        self.num_blocks, self.num_planes = head_dim // block_size, block_size // 2
        self.is_vanilla = has_vanilla_frequencies(self.name, init)
        self._check_blocks()
        self._set_vanilla(base, position_scale, frequencies)
        for name, shape in self.shapes().items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters: their names and shapes."""
        raise NotImplementedError

    def angles(self) -> Angles:
        """The angle matrices in the form that this method has them, in float32 or wider."""
        return self.angles_of(**{name: getattr(self, name) for name in self.shapes()})

    def angles_of(self, **parameters: Tensor) -> Angles:
        """The same of parameters given, which may have any number of heads."""
        raise NotImplementedError

    def same_kind(self, other: Method) -> bool:
        """Whether both mean the same by the same parameters."""
        return (
            self.name == other.name
            and self.extra_repr() == other.extra_repr()
            and self.given_frequencies == other.given_frequencies
            and self.settings == other.settings
        )

    def reset_parameters(self) -> None:
        """Fill the parameters anew, as ``init`` says."""
        raise NotImplementedError

    def rope_frequencies(self, like: Tensor) -> Tensor:
        """Vanilla RoPE's frequencies (N, m, f) for these sizes, on the device of ``like``."""
        return rope_frequencies(
            self.num_axes,
            self.num_blocks,
            self.block_size,
            base=self.base,
            given=self.given_frequencies,
            position_scale=self.position_scale,
            axis_order=self.axis_order,
            device=like.device,
        )

    def turned_rope(self, like: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """Vanilla RoPE with the axes turned at random, head by head: the direction (N, H, m) that
        the phases of a block grow along, and how fast they do, (m, f).
        """
        sizes = (self.num_axes, self.num_blocks, self.block_size)
        options: Any = {"axis_order": self.axis_order, "device": like.device}
        one, given = (1.0,) * self.num_axes, self.given_frequencies
        speeds = rope_frequencies(
            *sizes, base=self.base, given=given, position_scale=one, **options
        ).sum(0)
        empty = like.new_empty(num_heads, self.num_axes, self.num_axes, dtype=torch.float64)
        frame = torch.stack([nn.init.orthogonal_(axes) for axes in empty])  # columns: turned axes
        own = self.axis_of_block(like.device).double()
        scale = constants_like(self.position_scale, own)
        return scale[:, None, None] * torch.einsum("hij,jm->ihm", frame, own), speeds

    def scattered_rope(
        self, like: Tensor, num_heads: int, *, by_block: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Phases that grow in any direction, at any speed between vanilla RoPE's fastest and that
        over ``base``: directions (N, H, m, f), or (N, H, m, 1) ``by_block``, and speeds (H, m, f),
        whose logarithms are uniform.
        """
        planes = (num_heads, self.num_blocks, self.num_planes)
        each = (*planes[:2], 1) if by_block else planes
        direction = nn.functional.normalize(like.new_empty(self.num_axes, *each).normal_(), dim=0)
        scale = constants_like(self.position_scale, direction)
        speeds = self.base ** -like.new_empty(planes).uniform_()
        return scale[:, None, None, None] * direction, speeds

    def axis_of_block(self, device: torch.device) -> Tensor:
        """(N, m), 1 where block j turns with axis i, in the methods where each has one axis."""
        return axis_of_block(self.num_axes, self.num_blocks, self.axis_order, device)

    def rope_generators(self, like: Tensor) -> Tensor:
        """P (N, m, b, b) with P - P^T the angle matrices of vanilla RoPE."""
        return 0.5 * plane_generators(self.rope_frequencies(like), self.block_size)

    def extra_repr(self) -> str:
        vanilla = f", base={self.base}, position_scale={self.position_scale}"
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_axes={self.num_axes}, "
            f"block_size={self.block_size}, init={self.init!r}{vanilla if self.is_vanilla else ''}"
            f"{'' if self.spread == 1 else f', spread={self.spread}'}"
            f"{'' if self.axis_order == 'alternating' else ', axis_order=' + repr(self.axis_order)}"
        )

    def _known(self, options: dict[str, Any]) -> dict[str, Any]:
        for option in options:
            if option not in self.options:
                known = ", ".join(self.options) or "none"
                raise TypeError(f"{option}: expected an option of method {self.name!r} ({known})")
        return options

    def _check_blocks(self) -> None:
        dim, size, axes = self.head_dim, self.block_size, self.num_axes
        if self.init in ("turned", "scattered") and self.axis_partitioned:
            raise ValueError(
                f"init: {self.init!r} wants blocks that turn with every axis, and each of method "
                f"{self.name!r} keeps to one; expected normal, zeros or rope"
            )
        if dim % size:
            raise ValueError(f"block_size: expected a divisor of head_dim {dim}, got {size}")
        shared_out = self.is_vanilla and self.init != "scattered"
        if (self.axis_partitioned or shared_out) and self.num_blocks % axes:
            reason = f"method {self.name!r}" if self.axis_partitioned else f"init {self.init!r}"
            raise ValueError(
                f"head_dim: {reason} shares the blocks of a head out to the axes, so head_dim / "
                f"block_size must be a multiple of num_axes {axes}; got {dim} / {size} = "
                f"{self.num_blocks}. Choose num_heads so that head_dim is a multiple of "
                f"{axes * size}, or 'comrope-ld', 'comrope-torus'"
            )

    def _set_vanilla(
        self,
        base: float | None,
        position_scale: float | Sequence[float] | None,
        frequencies: Sequence[float] | None,
    ) -> None:
        given = {"base": base, "position_scale": position_scale, "frequencies": frequencies}
        for label, value in given.items():
            if value is not None and not self.is_vanilla:
                raise ValueError(
                    f"{label}: expected None, since only method 'rope' and the inits 'rope', "
                    f"'turned' and 'scattered' have vanilla RoPE's frequencies, got {value!r}; "
                    "other starts want positions in about [0, 1] (comrope.grid, comrope.normalize)"
                )
        self.base = _checks.real("base", 10000.0 if base is None else base, positive=True)
        scale = 1.0 if position_scale is None else position_scale
        self.position_scale = _checks.per_axis(
            "position_scale", scale, self.num_axes, positive=True
        )
        self.given_frequencies: tuple[float, ...] | None = None
        if frequencies is not None:
            if self.init == "scattered":
                raise ValueError("frequencies: expected None, since init 'scattered' draws them")
            if base is not None:
                raise ValueError("base: expected None beside frequencies, which take its place")
            planes = self.num_blocks // self.num_axes * self.num_planes
            if len(frequencies) != planes:
                wanted = f"{planes}, one a plane of an axis"
                raise ValueError(f"frequencies: expected {wanted}, got {len(frequencies)}")
            self.given_frequencies = tuple(_checks.real("frequencies", f) for f in frequencies)


def batched_angles(methods: Sequence[Method]) -> list[Angles] | None:
    """The angles of several layers, worked out at once: layers beside each other, as heads are.

    Small matrices in many small batches leave a GPU idle. None if they cannot be: layers that
    differ, that live on several devices or whose parameters are not whole (sharded) go one by one.
    """
    if not methods or not all(_joins(methods[0], method) for method in methods):
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


def _joins(first: Method, method: Method) -> bool:
    """Whether both can be stacked; a frozen layer is not, or its input would want a gradient."""
    if not first.same_kind(method):
        return False
    # To ask torch for all that is in a module would take longer than the rest, and here is no more.
    places = [
        [x.device for x in (*each._parameters.values(), *each._buffers.values()) if x is not None]
        for each in (first, method)
    ]
    for name, shape in method.shapes().items():
        mine, other = getattr(method, name), getattr(first, name)
        if type(mine) is not nn.Parameter or tuple(mine.shape) != shape:
            return False
        if mine.dtype != other.dtype or mine.requires_grad != other.requires_grad:
            return False
    return places[0] == places[1]


def has_vanilla_frequencies(method: str, init: str) -> bool:
    """Whether an encoding starts from vanilla RoPE's, which count patches or tokens."""
    return method == "rope" or init in ("rope", "turned", "scattered")


def skew_part(matrix: Tensor) -> Tensor:
    """P - P^T, the paper's map from any matrix to a skew-symmetric one."""
    return matrix - matrix.mT


def axis_of_block(
    num_axes: int,
    num_blocks: int,
    order: str = "alternating",
    device: torch.device | None = None,
) -> torch.Tensor:
    """(N, m), 1 where block j turns with axis i, and 0 elsewhere: where j = i mod N, or with order
    ``"contiguous"`` first all blocks of axis 0, then those of axis 1, and so on."""
    axes = torch.arange(num_axes, device=device)
    blocks = torch.arange(num_blocks, device=device)
    own = blocks % num_axes if order == "alternating" else blocks * num_axes // num_blocks
    return (own == axes[:, None]).float()


def rope_frequencies(
    num_axes: int,
    num_blocks: int,
    block_size: int,
    *,
    base: float = 10000.0,
    given: Sequence[float] | None = None,
    position_scale: Sequence[float] = (1.0,),
    axis_order: str = "alternating",
    device: torch.device | None = None,
) -> Tensor:
    """Vanilla RoPE: (N, m, f) in float64, non-zero where the block turns with the axis.

    The planes of one axis, in order, have the frequencies base^0, base^(-1/P), ...,
    base^(-(P-1)/P), with P planes an axis: for one axis those of RoFormer; or those ``given``.
    Blocks larger than two keep the planes of an axis together, which is the same encoding with its
    channels permuted.
    """
    planes = num_blocks // num_axes * (block_size // 2)
    if given is None:
        exponents = torch.arange(planes, device=device, dtype=torch.float64) / max(planes, 1)
        one_axis = base**-exponents
    else:
        # Nothing here may wait for a GPU: a forward pass of vanilla RoPE begins with it.
        one_axis = constants_like(given, torch.empty(0, device=device, dtype=torch.float64))
    one_axis = one_axis.view(num_blocks // num_axes, block_size // 2)
    beside = 1 if axis_order == "alternating" else 0  # where the other axes stand
    every = torch.stack([one_axis] * num_axes, beside).flatten(0, 1)
    mine = axis_of_block(num_axes, num_blocks, axis_order, device)
    each = zip(mine[..., None], position_scale, strict=True)
    return torch.stack([own * every * scale for own, scale in each])
