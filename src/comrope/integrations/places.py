"""Where the tokens of a vision model stand: told by its patch embedding, asked by its layers.

What one of its images means by position is a convention, a function of the index (..., 2) of a
patch and of the size of its grid: ``relative``, ours, or that of a model that rotates already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comrope import checks
from comrope import positions as coordinates

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
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """DINOv3's: from -1 to 1 between the edges of the image; ``augment`` as it does in training."""
    size = _like(size, index)
    if normalize != "separate":
        size = size.amax(-1, True) if normalize == "max" else size.amin(-1, True)
    place = 2 * (index + 0.5 + offset) / size - 1
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
    ) -> None:
        self.convention = convention
        self.class_position = checks.one_of("class_position", class_position, CLASS_POSITIONS)
        self.perturbation = checks.real("perturbation", perturbation)
        self.positions: Tensor | None = None  # (T, N) or (B, T, N), of patches
        self.away: dict[str, tuple[Tensor, bool]] = {}

    def __call__(self, module: nn.Module, inputs: Any, options: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            noisy = self.perturbation if module.training else 0.0
            self.positions = self._grid(output.shape[-2:], output, noisy)
        elif output[1] is not None:  # NaFlex: tokens, and the grid if it is the same for all
            noisy = self.perturbation if module.training else 0.0
            self.positions = self._grid(output[1], output[0], noisy)
        else:
            index = options["patch_coord"] if "patch_coord" in options else inputs[1]
            size = index.amax(dim=1, keepdim=True) + 1
            self.positions = self.convention(index.float(), size)

    def at(self, tokens: int) -> tuple[Tensor, int]:
        """Positions of all tokens, and how many of the first are not to be turned."""
        if self.positions is None:
            raise RuntimeError("positions: no image has passed through the patch embedding yet")
        prefix = tokens - self.positions.shape[-2]
        if prefix < 0:
            raise ValueError(
                f"tokens: expected one for each of the {self.positions.shape[-2]} patches, got "
                f"{tokens}; dropped patches (patch_drop_rate) are not supported"
            )
        if self.class_position == "unrotated" or not prefix:
            return self.positions, prefix
        return coordinates.with_class_token(self.positions, count=prefix), 0

    @torch.no_grad()
    def put_away(self, parameters: dict[str, nn.Parameter]) -> None:
        """Set absolute positions to zero, and freeze what is not used any more."""
        for name, parameter in parameters.items():
            self.away[name] = parameter.detach().clone(), parameter.requires_grad
            parameter.requires_grad_(False)
            if not name.startswith("rope."):
                parameter.zero_()

    @torch.no_grad()
    def bring_back(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, (value, learned) in self.away.items():
            parameters[name].copy_(value)
            parameters[name].requires_grad_(learned)

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
    return torch.as_tensor(size, device=index.device).to(index.dtype)
