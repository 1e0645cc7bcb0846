"""Where the tokens of a vision model stand: told by its patch embedding, asked by its layers.

What one of its images means by position is a convention, a function of the index (..., 2) of a
patch and of the size of its grid: ``relative``, ours, or that of a model that rotates already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comrope import _checks
from comrope import positions as coordinates
from comrope._dtypes import constants_like

__all__ = ["CLASS_POSITIONS", "Places", "axial", "centred", "relative"]

CLASS_POSITIONS = ("center", "unrotated")
Convention = Callable[[Tensor, Any], Tensor]


def relative(index: Tensor, size: Any) -> Tensor:
    """Centres of patches in [0, 1], as ``comrope.grid`` has them."""
    return (index + 0.5) / _like(size, index)


def axial(
    index: Tensor,
    size: Any,
    *,
    offset: float = 0.0,
    reference: Sequence[int] | None = None,
    flipped: bool = False,
) -> Tensor:
    """timm's: patches are counted, or as many of them as the ``reference`` grid has; x first if
    ``flipped``."""
    place = index + offset
    if reference is not None:
        place = place / _like(size, index) * _like(reference, index)
    return place.flip(-1) if flipped else place


def centred(
    index: Tensor,
    size: Any,
    *,
    offset: float = 0.0,
    normalize: str = "separate",
    flipped: bool = False,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """DINOv3's: from -1 to 1 between the edges of the image, x first if ``flipped``; ``augment`` as
    it does in training."""
    size = _like(size, index)
    if normalize != "separate":
        size = size.amax(-1, True) if normalize == "max" else size.amin(-1, True)
    place = 2 * (index + 0.5 + offset) / size - 1
    place = place.flip(-1) if flipped else place
    return place if augment is None else augment(place)


class Places:
    """The positions of the batch that a model sees now.

    A forward hook of a patch embedding that leaves behind (B, C, rows, columns), and of timm's
    NaFlex one. One is shared by all layers of a model; copies of the model have their own.
    """

    def __init__(
        self,
        convention: Convention = relative,
        *,
        class_position: str = "center",
        perturbation: float = 0.0,
        prefix: int = 0,
    ) -> None:
        self.convention, self.prefix = convention, prefix
        self.class_position = _checks.one_of("class_position", class_position, CLASS_POSITIONS)
        self.perturbation = _checks.real("perturbation", perturbation)
        self.positions: Tensor | None = None  # (T, N) or (B, T, N), of tokens, or of patches alone
        self.tokens = 0
        self.away: dict[str, tuple[Tensor | None, bool]] = {}
        # Forward passes that are not like each other, with and without gradients: see ``_count``.
        self.learning: set[Any] = set()
        self.others: set[Any] = set()
        self.recomputed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "positions": None}

    def __call__(self, module: Any, inputs: Any, options: Any, output: Any) -> None:
        noise = self.perturbation if module.training else 0.0
        if isinstance(output, tuple):  # NaFlex: tokens, and the grid if it is the same for all
            tokens, size = output
        else:
            tokens, size = output, output.shape[-2:]
            if not isinstance(module, nn.Conv2d):  # timm's, which leaves no grid behind
                size = module.dynamic_feat_size(inputs[0].shape[-2:])
        if size is None:
            index = options["patch_coord"] if "patch_coord" in options else inputs[1]
            positions = self._of_each(index, noise)
        else:
            positions = self._grid(size, tokens, noise)
        self.tokens = self.prefix + positions.shape[-2]
        if self.class_position == "center":
            positions = coordinates.with_class_token(positions, count=self.prefix)
        self.positions = positions
        self._count(size, noise)

    def at(self, tokens: int) -> tuple[Tensor, int]:
        """Positions of all tokens, and how many of the first are not to be turned."""
        if self.positions is None:
            raise RuntimeError("positions: no image has passed through the patch embedding yet")
        if tokens != self.tokens:
            raise ValueError(
                f"tokens: expected {self.prefix} and one for each of the "
                f"{self.tokens - self.prefix} patches, got {tokens}; dropped patches and tokens "
                "of others are not supported"
            )
        self._check_pass()
        return self.positions, 0 if self.class_position == "center" else self.prefix

    @torch.no_grad()
    def put_away(self, parameters: dict[str, nn.Parameter]) -> None:
        """Set absolute positions to zero, and freeze what is not used any more."""
        for name, parameter in parameters.items():
            absolute = not name.startswith("rope.")
            value = parameter.detach().clone() if absolute else None
            self.away[name] = value, parameter.requires_grad
            parameter.requires_grad_(False)
            if absolute:
                parameter.zero_()

    def check_way_back(self, parameters: dict[str, nn.Parameter]) -> None:
        """Whether ``bring_back`` will find everything as it was put away."""
        for name, (value, _) in self.away.items():
            if name not in parameters or (
                value is not None and value.shape != parameters[name].shape
            ):
                raise ValueError(f"model: {name} is not what it was when the model was swapped")

    @torch.no_grad()
    def bring_back(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, (value, learned) in self.away.items():
            if value is not None:
                parameters[name].copy_(value)
            parameters[name].requires_grad_(learned)

    def _count(self, size: Any, noise: float) -> None:
        """Passes that are not like each other, between which a recomputation could not choose."""
        if torch.compiler.is_compiling():
            return
        if self.recomputed or torch.is_grad_enabled():
            self.others.clear()
        if self.recomputed:
            self.learning.clear()
        self.recomputed = False
        passes = self.learning if torch.is_grad_enabled() else self.others
        if len(passes) < 2:
            passes.add(len(passes) if noise or size is None else tuple(size))

    def _check_pass(self) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return
        self.recomputed = True  # in a backward pass, by gradient checkpointing
        if len(self.learning | self.others) > 1:
            raise RuntimeError(
                "gradient checkpointing: the positions of this forward pass are gone, since "
                "another came before its backward pass; call backward after each"
            )

    def _of_each(self, index: Tensor, noise: float) -> Tensor:
        if noise:
            raise ValueError("perturbation: expected 0 where images of a batch differ in size")
        return self.convention(index.float(), index.amax(dim=1, keepdim=True) + 1)

    def _grid(self, size: Sequence[int], like: Tensor, noise: float) -> Tensor:
        rows, columns = (torch.arange(n, device=like.device).float() for n in size)
        index = torch.cartesian_prod(rows, columns)
        positions = self.convention(index, size)
        if not noise:
            return positions
        corner = torch.zeros(2)
        patch = (self.convention(corner + 1, size) - self.convention(corner, size)).abs().tolist()
        return coordinates.perturb(positions, patch, noise, batch_size=like.shape[0])


def _like(size: Any, index: Tensor) -> Tensor:
    if isinstance(size, Tensor):
        return size.to(index)
    return constants_like(size, index)
