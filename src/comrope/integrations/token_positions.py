"""Positions of the tokens of a vision model: set by its patch embedding, read by its layers.

A convention computes positions from the index (..., 2) of a patch and the size of its grid:
``normalized`` is ours, the others are those of models that already rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comrope import _checks
from comrope import positions as coordinates
from comrope._dtypes import constants_like

__all__ = ["CLASS_POSITIONS", "TokenPositions", "axial", "centered", "normalized"]

CLASS_POSITIONS = ("center", "unrotated")
Convention = Callable[[Tensor, Any], Tensor]


def normalized(index: Tensor, size: Any) -> Tensor:
    """Return patch centres in [0, 1], as ``comrope.grid`` does."""
    return (index + 0.5) / _like(size, index)


def axial(
    index: Tensor,
    size: Any,
    *,
    offset: float = 0.0,
    reference: Sequence[int] | None = None,
    flipped: bool = False,
) -> Tensor:
    """Return timm's positions: patch indices, scaled to the ``reference`` grid if it is given.

    ``flipped`` puts x first.
    """
    position = index + offset
    if reference is not None:
        position = position / _like(size, index) * _like(reference, index)
    return position.flip(-1) if flipped else position


def centered(
    index: Tensor,
    size: Any,
    *,
    offset: float = 0.0,
    normalize: str = "separate",
    flipped: bool = False,
    augment: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return DINOv3's positions: from -1 to 1 between the edges of the image.

    ``flipped`` puts x first; ``augment`` is applied last.
    """
    size = _like(size, index)
    if normalize != "separate":
        size = size.amax(-1, True) if normalize == "max" else size.amin(-1, True)
    position = 2 * (index + 0.5 + offset) / size - 1
    position = position.flip(-1) if flipped else position
    return position if augment is None else augment(position)


class TokenPositions:
    """The positions of the batch that a model is processing.

    A forward hook of a patch embedding with outputs (B, C, rows, columns), or of timm's NaFlex one.
    All layers of a model share one; copies of the model have their own.
    """

    def __init__(
        self,
        convention: Convention = normalized,
        *,
        class_position: str = "center",
        perturbation: float = 0.0,
        prefix: int = 0,
    ) -> None:
        self.convention, self.prefix = convention, prefix
        self.class_position = _checks.one_of("class_position", class_position, CLASS_POSITIONS)
        self.perturbation = _checks.real("perturbation", perturbation)
        self.positions: Tensor | None = None  # (T, N) or (B, T, N), of tokens or only of patches
        self.tokens = 0
        # Parameters that are no longer used: their values if they are zero now, and requires_grad.
        self.disabled: dict[str, tuple[Tensor | None, bool]] = {}
        # Different forward passes since the last backward pass: see ``_count``.
        self.with_grad: set[Any] = set()
        self.without_grad: set[Any] = set()
        self.recomputed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "positions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        old = {"away": "disabled", "learning": "with_grad", "others": "without_grad"}  # in 0.1
        vars(self).update({old.get(name, name): value for name, value in state.items()})

    def __call__(self, module: Any, inputs: Any, options: Any, output: Any) -> None:
        perturbation = self.perturbation if module.training else 0.0
        if isinstance(output, tuple):  # NaFlex: tokens, and the grid if all images share one
            tokens, size = output
        else:
            tokens, size = output, output.shape[-2:]
            if not isinstance(module, nn.Conv2d):  # timm's, which flattens the grid
                size = module.dynamic_feat_size(inputs[0].shape[-2:])
        if size is None:
            index = options["patch_coord"] if "patch_coord" in options else inputs[1]
            positions = self._of_each(index, perturbation)
        else:
            positions = self._grid(size, tokens, perturbation)
        self.tokens = self.prefix + positions.shape[-2]
        if self.class_position == "center":
            positions = coordinates.with_class_token(positions, count=self.prefix)
        self.positions = positions
        self._count(size, perturbation)

    def at(self, tokens: int) -> tuple[Tensor, int]:
        """Return the positions of all tokens, and how many leading tokens are not rotated."""
        if self.positions is None:
            raise RuntimeError(
                "positions: none yet, because the patch embedding was not called; call the model"
            )
        if tokens != self.tokens:
            raise ValueError(
                f"tokens: expected {self.prefix} and one for each of the "
                f"{self.tokens - self.prefix} patches, got {tokens}; dropped patches and "
                "additional tokens are not supported"
            )
        self._check_pass()
        return self.positions, 0 if self.class_position == "center" else self.prefix

    @torch.no_grad()
    def disable(self, parameters: dict[str, nn.Parameter]) -> None:
        """Freeze parameters that are no longer used, and set absolute positions to zero."""
        for name, parameter in parameters.items():
            absolute = not name.startswith("rope.")
            value = parameter.detach().clone() if absolute else None
            self.disabled[name] = value, parameter.requires_grad
            parameter.requires_grad_(False)
            if absolute:
                parameter.zero_()

    def check_restorable(self, parameters: dict[str, nn.Parameter]) -> None:
        """Raise unless ``restore`` finds all parameters with their shapes."""
        for name, (value, _) in self.disabled.items():
            if name not in parameters or (
                value is not None and value.shape != parameters[name].shape
            ):
                raise ValueError(
                    f"model: {name} was removed or resized after swap, so it cannot be restored"
                )

    @torch.no_grad()
    def restore(self, parameters: dict[str, nn.Parameter]) -> None:
        """Undo ``disable``."""
        for name, (value, learned) in self.disabled.items():
            if value is not None:
                parameters[name].copy_(value)
            parameters[name].requires_grad_(learned)

    def _count(self, size: Any, perturbation: float) -> None:
        """Record forward passes with different positions, which a recomputation could confuse."""
        if torch.compiler.is_compiling():
            return
        if self.recomputed or torch.is_grad_enabled():
            self.without_grad.clear()
        if self.recomputed:
            self.with_grad.clear()
        self.recomputed = False
        passes = self.with_grad if torch.is_grad_enabled() else self.without_grad
        if len(passes) < 2:
            passes.add(len(passes) if perturbation or size is None else tuple(size))

    def _check_pass(self) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return
        self.recomputed = True  # in a backward pass, by gradient checkpointing
        if len(self.with_grad | self.without_grad) > 1:
            raise RuntimeError(
                "gradient checkpointing: the positions of this forward pass were replaced by "
                "those of a later one; call backward after each forward pass"
            )

    def _of_each(self, index: Tensor, perturbation: float) -> Tensor:
        """Return the positions of images that differ in size."""
        if perturbation:
            raise ValueError("perturbation: expected 0 where images of a batch differ in size")
        return self.convention(index.float(), index.amax(dim=1, keepdim=True) + 1)

    def _grid(self, size: Sequence[int], like: Tensor, perturbation: float) -> Tensor:
        """Return the positions of images of one size."""
        rows, columns = (torch.arange(n, device=like.device).float() for n in size)
        index = torch.cartesian_prod(rows, columns)
        positions = self.convention(index, size)
        if not perturbation:
            return positions
        corner = torch.zeros(2)
        patch = (self.convention(corner + 1, size) - self.convention(corner, size)).abs().tolist()
        return coordinates.perturb(positions, patch, perturbation, batch_size=like.shape[0])


def _like(size: Any, index: Tensor) -> Tensor:
    if isinstance(size, Tensor):
        return size.to(index)
    return constants_like(size, index)
