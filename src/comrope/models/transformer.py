"""The base class of our models: blocks whose attention layers rotate, and their shared angles.

Shapes: B batch, T tokens, C channels, N axes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from comrope import _checks, ops
from comrope.analysis import rotary_modules
from comrope.angles import Angles
from comrope.methods import METHODS, batched_angles, method_class
from comrope.models.attention import Attend, Block, attend_to_all, is_hooked, uses_scores_only
from comrope.models.pretrained import Pretrained
from comrope.rotary import RotaryEmbedding

__all__ = ["ROTARY_OPTIONS", "RotaryTransformer", "check_divisor", "check_rotation"]

NOT_ARGUMENTS = ("self", "__class__", "rotary_options")  # among the locals of the constructor
# Types of rotary_options: other keywords of RotaryEmbedding and of its methods.
ROTARY_OPTIONS = {
    "backend": str,
    "channel_order": str,
    "axis_order": str,
    "spread": float,
    "frequencies": Sequence[float] | None,
    "rotated_share": float | None,
    "shared_heads": bool,
    "log_frequencies": bool,
    **{
        option: type(default)
        for method in METHODS
        for option, default in method_class(method).options.items()
    },
}


class RotaryTransformer(Pretrained):
    """Transformer blocks with rotations.

    A subclass passes the locals of its constructor to ``note_arguments`` first, fills ``blocks``,
    and describes its input: ``input_name``, ``example_input`` and ``dynamic_sizes``.
    """

    extra_arguments = ROTARY_OPTIONS
    input_name: ClassVar[str]  # of the argument of ``forward``
    blocks: nn.ModuleList
    position: str
    axis_scale: Sequence[float] | None = None  # factors of the coordinates of each axis
    grad_checkpointing = False

    def note_arguments(self, given: Mapping[str, Any], rotary_options: Mapping[str, Any]) -> None:
        """Keep the keywords of the constructor, for ``arguments``."""
        self._given = {k: v for k, v in given.items() if k not in NOT_ARGUMENTS}
        self._given |= rotary_options

    def arguments(self) -> dict[str, Any]:
        """Return the keywords that make the same model."""
        return dict(self._given)

    def note_folded(self) -> None:
        """Update ``arguments`` after ``comrope.fold``: all rotations are RoPE-Mixed now."""
        plain = {"position": "rope-mixed", "init": "zeros", "base": None}
        options = method_class(self.position).options
        starts = ("frequencies", "rotated_share", "spread", "locality_bias")
        gone = (*options, *starts, "log_frequencies")
        kept = {k: v for k, v in self._given.items() if k not in gone}
        self._given, self.position = {**kept, **plain}, "rope-mixed"

    def apply_blocks(
        self,
        x: Tensor,
        positions: Tensor,
        angles: Sequence[Angles | None] | None = None,
        attend: Sequence[Attend] | None = None,
    ) -> Tensor:
        """Apply all blocks to x (B, T, C).

        Args:
            x: (B, T, C).
            positions: (T, N) or (B, T, N).
            angles: Of every block, as ``_angles`` returns them.
            attend: Of every block, as in ``Attention.forward``.
        """
        attend = [attend_to_all] * len(self.blocks) if attend is None else attend
        if angles is None:
            angles = self._angles(positions if all(map(uses_scores_only, attend)) else None)
        for block, own, each in zip(self.blocks, angles, attend, strict=True):
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, positions, own, use_reentrant=False, attend=each)
            else:
                x = block(x, positions, own, attend=each)
        return x

    def _angles(self, positions: Tensor | None = None) -> Sequence[Angles | None]:
        """Compute the angles of all blocks at once.

        Return None for every block if hooks fetch parameters when a block is called (sharded or
        offloaded models). Every block then computes its own angles.

        Args:
            positions: As in ``ops.to_commuting``.
        """
        separate: list[None] = [None] * len(self.blocks)
        ropes: list[RotaryEmbedding] = []
        for block in cast(Iterable[Block], self.blocks):
            rope = getattr(block.attn, "rope", None)
            if not isinstance(rope, RotaryEmbedding):
                return separate
            owners = (block, block.attn) if "rope" in block.attn._modules else ()
            for module in (*owners, rope, rope.method):
                if module._forward_pre_hooks or hasattr(module, "_hf_hook"):
                    return separate
            ropes.append(rope)
        different = list(dict.fromkeys(rope.method for rope in ropes))  # one, if blocks share it
        prepare = None
        plain = all(rope.backend in ("auto", "spectral") and not is_hooked(rope) for rope in ropes)
        if plain and positions is not None and positions.device.type == "cpu":
            prepare = functools.partial(ops.to_commuting, positions=positions)
        found = batched_angles(different, prepare)
        return separate if found is None else found * (len(ropes) // len(different))

    def example_input(
        self, batch: int, more: int = 0, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return a random input of the size at training.

        Args:
            batch: B.
            more: Patches or tokens to add, at least, along every axis of ``dynamic_sizes``.
            generator: Of the random numbers.
        """
        raise NotImplementedError

    def dynamic_sizes(self) -> dict[int, tuple[str, int]]:
        """Return the dimensions of an input, besides the batch, that may have other sizes.

        Returns:
            Dimension -> the name of what is counted along it, and its size in numbers.
        """
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Save only the inputs of blocks, and recompute the rest in the backward pass."""
        self.grad_checkpointing = enable

    def position_parameters(self) -> int:
        """Count the parameters of the position encoding."""
        return sum(p.numel() for rope in rotary_modules(self).values() for p in rope.parameters())

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: angles."""
        return {
            f"{name}.{parameter}"
            for name, module in rotary_modules(self).items()
            for parameter in module.no_weight_decay()
        }


def check_rotation(
    position: str,
    *,
    init: str,
    default_init: str,
    base: float | None,
    rotary_options: Mapping[str, Any],
    **others: tuple[Any, Any],
) -> None:
    """Raise if a model without a rotation has options of one, or if ``init`` cannot be saved.

    Args:
        position: The position encoding of the model.
        init, base, rotary_options: Arguments of the model.
        default_init: The default of ``init``.
        others: Name -> value and default, of other arguments that need a rotation.
    """
    if not isinstance(init, str):
        raise TypeError(
            f"init: expected a name such as 'rope', got {init!r}; give its fields as base=, "
            "spread= and frequencies="
        )
    if position in METHODS:
        return
    for name, (value, default) in others.items():
        if value != default:
            raise ValueError(
                f"{name}: expected {default!r}, since position {position!r} has no rotation"
            )
    if rotary_options or init != default_init or base is not None:
        raise ValueError(
            f"position: {position!r} has no rotation, so it takes no init, base or options; got "
            f"init={init!r}, base={base!r}, {dict(rotary_options)}"
        )


def check_divisor(label: str, value: int, **of: int) -> int:
    """Return ``value`` if it is a positive divisor of the argument ``of``, given by its name."""
    _checks.integer(label, value, 1)
    for name, number in of.items():
        if number % value:
            raise ValueError(f"{label}: expected a divisor of {name} {number}, got {value}")
    return value
