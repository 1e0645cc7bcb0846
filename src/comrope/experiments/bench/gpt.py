"""A GPT of comrope with every rotation: tokens per second in training.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from comrope.experiments.bench.cases import Setting, Shape, block_size_of, perturb_angles
from comrope.experiments.bench.networks import NONE, Maker, candidates_of
from comrope.experiments.bench.rivals import PLAIN, PlainRoPE, RivalAttention
from comrope.experiments.bench.runner import Baseline, Part
from comrope.experiments.common.timing import cross_entropy_backward
from comrope.methods import METHODS
from comrope.models.attention import Attention
from comrope.models.gpt import GPT, create_gpt

__all__ = ["VALUES", "gpt"]

VALUES = ", rotated values"  # the end of the names of rows with them
IN_STUDY = ("rope", "rope-mixed", "comrope-ld", "comrope-torus")  # of languages


class Tokens(nn.Module):
    """A GPT for tokens (B, T, 1). The correctness check selects samples of inputs of three axes."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> Iterable[nn.Module]:
        return self.model.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens.squeeze(-1))


def gpt(setting: Setting) -> Part:
    """Return the part for a GPT: inference, and a training step without the optimizer.

    There are only compiled rows if the preset has them: each row has a long check.
    """
    sizes = setting.gpt
    batch, length, vocabulary = sizes["batch"], sizes["context"], sizes["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(vocabulary, (batch, length + 1), generator=generator).to(setting.device)
    inputs = (text[:, :-1, None].contiguous(),)
    every = candidates_of(setting, _makers(setting), inputs, partial(_next, text[:, 1:]))
    candidates = [candidate for candidate in every if candidate.compiled == setting.compile]
    title = (
        f"{sizes['name']}, {sizes['depth']} layers ({length} tokens, batch {batch}, "
        f"{setting.dtype_name})"
    )
    return Part("gpt", title, NONE, candidates, (Baseline("none", NONE), Baseline("rope", "rope")))


def _makers(setting: Setting) -> list[Maker]:
    sizes = dict(setting.gpt)
    name, _ = sizes.pop("name"), sizes.pop("batch")

    def own(position: str, **options: Any) -> nn.Module:
        if position in METHODS:
            options["block_size"] = block_size_of(position)
        model = create_gpt(name, position=position, **sizes, **options)
        perturb_angles(model)
        return Tokens(model)

    def plain() -> nn.Module:
        wrapped = own("none")
        model = cast(GPT, wrapped.model)
        shape = Shape(
            model.context,
            model.num_kv_heads,
            model.head_dim,
            (),
            setting.device,
            setting.dtype,
        )
        rival = PlainRoPE.of(shape)
        for block in model.blocks:
            block.attn = RivalAttention(cast(Attention, block.attn), rival)
        return wrapped

    studied = (*IN_STUDY, *(method for method in METHODS if method not in IN_STUDY))
    rows: list[Maker] = [(m, m, "auto", partial(own, m)) for m in studied]
    values: list[Maker] = [
        (method + VALUES, method, "auto", partial(own, method, rotate_values=True))
        for method in IN_STUDY
    ]
    few = len(IN_STUDY)
    none: Maker = (NONE, "none", "", partial(own, "none"))
    return [none, *rows[:few], *values, (PLAIN, "rope", "", plain), *rows[few:]]


def _next(targets: Tensor, logits: Tensor) -> None:
    cross_entropy_backward(targets.flatten(), logits.flatten(0, 1))
