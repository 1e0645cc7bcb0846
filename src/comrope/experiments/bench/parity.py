"""Correctness checks of the benchmarks: only what computes the right result is timed.

A result may differ from the exact one by the rounding of its own dtype. That rounding is measured:
the reference implementation is computed twice, in float64 (exact) and from the same inputs in the
dtype that is timed (rounded). A candidate passes if its error is at most ``SLACK`` times the error
of the rounded reference, plus a small floor. The whole batch is computed; a few samples of it are
compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from comrope.analysis import rotary_modules
from comrope.experiments.common.parity import TOLERANCE
from comrope.experiments.common.timing import Cast, inference_step, training_step

__all__ = ["SLACK", "Rotation", "Verdict", "network_parity", "rotation_parity", "watched_samples"]

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
SLACK = 2.0
FLOOR = 32 * torch.finfo(torch.float32).eps  # of a rotation, for what float32 itself rounds


class Verdict(NamedTuple):
    """The largest relative error of a comparison, and its limit."""

    error: float
    limit: float
    part: str

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # not so for NaN

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict]) -> Verdict:
        def excess(verdict: Verdict) -> float:
            share = verdict.error / verdict.limit
            return math.inf if math.isnan(share) else share

        return max(verdicts, key=excess)


def watched_samples(batch: int) -> list[int]:
    """Return the first, the middle and the last sample, which shows that all are computed."""
    return sorted({0, batch // 2, batch - 1})


def rotation_parity(
    found: Rotation,
    exact: Rotation,
    q: Tensor,
    k: Tensor,
    *,
    angles: Sequence[Tensor] = (),
    exact_angles: Sequence[Tensor] = (),
) -> Verdict:
    """Compare scores of rotated q (B, H G, T, D) and k (B, H, T, D), and gradients of all inputs.

    ``exact`` gets the watched samples only, in float64 and in the dtype of q. It must compute in
    the widest dtype of float32 and its inputs. ``angles`` are the learned parameters of each.
    """
    few = watched_samples(q.shape[0])
    got = _scores_and_gradients(found, q, k, angles, few)
    some_q, some_k = q[few].detach(), k[few].detach()
    everyone = list(range(len(few)))
    rounded = _scores_and_gradients(exact, some_q, some_k, exact_angles, everyone)
    exact_parts = _scores_and_gradients(
        exact, some_q.double(), some_k.double(), exact_angles, everyone
    )
    return Verdict.worst(
        Verdict(_error(got[part], expected), SLACK * _error(rounded[part], expected) + FLOOR, part)
        for part, expected in exact_parts.items()
    )


def network_parity(
    module: nn.Module,
    inputs: Sequence[Tensor],
    cast: Cast,
    make_exact: Callable[[nn.Module], None],
    *,
    compiled: bool,
) -> Verdict:
    """Compare outputs and gradients of a network with a copy that ``make_exact`` has changed.

    The network in its own dtype is compared with the copy in float32; the limit is ``SLACK`` times
    the error of the copy in that dtype. A network that is not compiled is compared in float32 as
    well. (Calling a compiled one with other inputs would compile it again.) Rotations of the copy
    are computed in float64, because float32 phases are not exact at thousands of tokens.
    """
    few = watched_samples(inputs[0].shape[0])
    some = [_rows(tensor, few, inputs[0].shape[0]) for tensor in inputs]
    reference = copy.deepcopy(module)  # copies are not compiled
    make_exact(reference)
    everyone = list(range(len(few)))
    rounded = _outputs_and_gradients(reference, some, cast, everyone)
    wide_inputs = [tensor.float() if tensor.is_floating_point() else tensor for tensor in some]
    reference.float()
    for rotary in rotary_modules(reference).values():
        rotary.double()
    exact_parts = _outputs_and_gradients(reference, wide_inputs, _no_cast(inputs[0]), everyone)
    got = _outputs_and_gradients(module, inputs, cast, few)
    verdicts = [
        Verdict(
            _error(got[part], expected), SLACK * _error(rounded[part], expected) + TOLERANCE, part
        )
        for part, expected in exact_parts.items()
    ]
    if not compiled:
        same = copy.deepcopy(module).float()
        wide = _outputs_and_gradients(same, wide_inputs, _no_cast(inputs[0]), everyone)
        verdicts += [
            Verdict(_error(wide[part], expected), TOLERANCE, f"{part} in float32")
            for part, expected in exact_parts.items()
        ]
    module.zero_grad(set_to_none=True)
    return Verdict.worst(verdicts)


def _scores_and_gradients(
    rotate: Rotation, q: Tensor, k: Tensor, angles: Sequence[Tensor], few: list[int]
) -> dict[str, Tensor]:
    """Of the samples ``few``: scores, and the gradients of a loss of them."""
    q, k = (x.detach().requires_grad_() for x in (q, k))
    turned_q, turned_k = rotate(q, k)
    scores = _scores(turned_q[few].double(), turned_k[few].double())
    # A bent loss: the gradient that reaches q' depends on k', as it does in attention.
    loss = (scores / q.shape[-1] ** 0.5).tanh().sum()
    gradients = torch.autograd.grad(loss, [q, k, *angles])
    parts = {"scores": scores, "gradient of q": gradients[0][few]}
    parts["gradient of k"] = gradients[1][few]
    for number, gradient in enumerate(gradients[2:]):
        parts[f"gradient of angles {number}"] = gradient
    return {part: value.detach().double() for part, value in parts.items()}


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Of every token with those at a few distances: all of them would be too many at 8k tokens."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    tokens = q.shape[2]
    distances = sorted({d % tokens for d in (0, 1, 2, tokens // 7, tokens // 3, tokens // 2, -1)})
    return torch.stack([(q * k.roll(-distance, 2)).sum(-1) for distance in distances])


def _outputs_and_gradients(
    module: nn.Module, inputs: Sequence[Tensor], cast: Cast, few: list[int]
) -> dict[str, Tensor]:
    """Of the samples ``few``: outputs in inference, gradients of weights and angles in training."""
    outputs = inference_step(cast, module, inputs)[few]
    training_step(cast, module, inputs, lambda found: _watch(found, few))
    of_angles = {
        id(parameter)
        for rotary in rotary_modules(module).values()
        for parameter in rotary.parameters()
    }
    parts = {"outputs": [outputs], "gradients of weights": [], "gradients of angles": []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            kind = "angles" if id(parameter) in of_angles else "weights"
            gradient = parameter.grad
            missing = torch.full_like(parameter, torch.nan)
            parts[f"gradients of {kind}"].append(missing if gradient is None else gradient)
    module.zero_grad(set_to_none=True)
    return {
        part: torch.cat([value.detach().float().flatten() for value in values])
        for part, values in parts.items()
        if values
    }


def _watch(outputs: Tensor, few: list[int]) -> None:
    """Backward from a loss of these samples alone, in which every output weighs differently."""
    some = outputs[few].float()
    weights = torch.linspace(-1, 1, some.numel(), device=some.device).reshape(some.shape)
    (some.tanh() * weights).sum().backward()


def _rows(tensor: Tensor, few: list[int], batch: int) -> Tensor:
    """The rows of a batch; what is shared by the batch, as positions (T, N) may be, as it is."""
    per_sample = tensor.ndim > 2 and tensor.shape[0] == batch
    return (tensor[few] if per_sample else tensor).detach()


def _no_cast(like: Tensor) -> Cast:
    return lambda: torch.autocast(like.device.type, enabled=False)


def _error(found: Tensor, expected: Tensor) -> float:
    scale = expected.norm()
    return float((found - expected).norm() / torch.where(scale > 0, scale, 1.0))
