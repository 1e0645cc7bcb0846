"""The gate of the benchmarks: what is timed must first compute what it says it computes.

A result may differ from the exact one by the noise of its own dtype. How much that is, is measured
rather than guessed: the slow obvious formula is computed twice, in float64 (the truth) and from the
same inputs in the dtype that is timed (the twin: float32 inside, its results rounded). A candidate
passes if it is no further from the truth than ``SLACK`` times its twin, and a small floor. Samples
are checked at the full size that is timed, only a few of the batch being looked at.
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
    """The largest relative error of what was compared, and the most that it may be."""

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
    """The first, the last and one between: enough to see that all of a batch is worked on."""
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
    """Scores of rotated q (B, H G, T, D) and k (B, H, T, D), and the gradients of all inputs.

    ``exact`` is given the watched samples alone, in float64 and in the dtype of q; it must compute
    in the widest dtype of float32 and its inputs. ``angles`` are the learned parameters of each.
    """
    few = watched_samples(q.shape[0])
    got = _scores_and_gradients(found, q, k, angles, few)
    some_q, some_k = q[few].detach(), k[few].detach()
    everyone = list(range(len(few)))
    twin = _scores_and_gradients(exact, some_q, some_k, exact_angles, everyone)
    truth = _scores_and_gradients(exact, some_q.double(), some_k.double(), exact_angles, everyone)
    return Verdict.worst(
        Verdict(_error(got[part], expected), SLACK * _error(twin[part], expected) + FLOOR, part)
        for part, expected in truth.items()
    )


def network_parity(
    module: nn.Module,
    inputs: Sequence[Tensor],
    cast: Cast,
    make_exact: Callable[[nn.Module], None],
    *,
    compiled: bool,
) -> Verdict:
    """Outputs and gradients of a network against a copy of it that ``make_exact`` has changed.

    As it is timed, in its own dtype, against the copy in float32, within ``SLACK`` times the error
    of the copy in that dtype; and unless it is compiled, both in float32. (A compiled network is
    not called with anything but what is timed: it would be compiled for that as well.) Rotations of
    the copy are float64 inside: at thousands of tokens float32 is no truth about phases.
    """
    few = watched_samples(inputs[0].shape[0])
    some = [_rows(tensor, few, inputs[0].shape[0]) for tensor in inputs]
    twin = copy.deepcopy(module)  # copies are not compiled
    make_exact(twin)
    everyone = list(range(len(few)))
    near = _outputs_and_gradients(twin, some, cast, everyone)
    wide_inputs = [tensor.float() if tensor.is_floating_point() else tensor for tensor in some]
    twin.float()
    for rotary in rotary_modules(twin).values():
        rotary.double()
    truth = _outputs_and_gradients(twin, wide_inputs, _no_cast(inputs[0]), everyone)
    got = _outputs_and_gradients(module, inputs, cast, few)
    verdicts = [
        Verdict(_error(got[part], expected), SLACK * _error(near[part], expected) + TOLERANCE, part)
        for part, expected in truth.items()
    ]
    if not compiled:
        same = copy.deepcopy(module).float()
        wide = _outputs_and_gradients(same, wide_inputs, _no_cast(inputs[0]), everyone)
        verdicts += [
            Verdict(_error(wide[part], expected), TOLERANCE, f"{part} in float32")
            for part, expected in truth.items()
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
