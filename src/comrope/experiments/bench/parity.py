"""Correctness checks of the benchmarks: only candidates with correct results are timed.

A result may differ from the exact one by the rounding of its dtype. That rounding is measured: the
reference implementation is computed twice, in float64 (exact) and in the timed dtype (rounded),
from the same inputs. A candidate passes if its error is at most ``SLACK`` times the error of the
rounded reference, plus a small floor. The complete batch is computed, and a few of its samples are
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

__all__ = [
    "SLACK",
    "Rotation",
    "Verdict",
    "network_parity",
    "outputs_parity",
    "rotation_parity",
    "watched_samples",
]

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
SLACK = 2.0
MANY = 2**22
FLOOR = 32 * torch.finfo(torch.float32).eps  # of a rotation, for the rounding of float32


class Verdict(NamedTuple):
    """The largest relative error of a comparison, and its limit."""

    error: float
    limit: float
    part: str

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict]) -> Verdict:
        def excess(verdict: Verdict) -> float:
            share = verdict.error / verdict.limit
            return math.inf if math.isnan(share) else share

        return max(verdicts, key=excess)


def watched_samples(batch: int, numbers: int = 0) -> list[int]:
    """Return the indices of the first, the middle and the last sample of a batch.

    Only the last one if a sample has more than ``MANY`` numbers, since checks of more take long.
    """
    return [batch - 1] if numbers > MANY else sorted({0, batch // 2, batch - 1})


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

    ``exact`` gets only the watched samples, in float64 and in the dtype of q. It must compute in
    the widest dtype of float32 and its inputs. ``angles`` and ``exact_angles`` are the learned
    parameters of ``found`` and ``exact``.
    """
    few = watched_samples(q.shape[0], q[0].numel())
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
    """Compare outputs and gradients of a network with those of a copy changed by ``make_exact``.

    The network in its dtype is compared with the copy in float32. The limit is ``SLACK`` times the
    error of the copy in that dtype. A network that is not compiled is also compared in float32 (a
    compiled one would be compiled again for other inputs). Rotations of the copy are computed in
    float64, because float32 phases are inexact for thousands of tokens.
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


@torch.no_grad()
def outputs_parity(
    found: Callable[[], Tensor], model: nn.Module, exact: Callable[[nn.Module], Tensor]
) -> Verdict:
    """Compare outputs with those of ``exact``, computed by a copy of the model in float64."""
    expected = exact(copy.deepcopy(model).double())
    rounded = exact(copy.deepcopy(model))
    limit = SLACK * _error(rounded.double(), expected) + FLOOR
    return Verdict(_error(found().double(), expected), limit, "outputs")


def _scores_and_gradients(
    rotate: Rotation, q: Tensor, k: Tensor, angles: Sequence[Tensor], few: list[int]
) -> dict[str, Tensor]:
    """Return the scores of the samples ``few``, and the gradients of a loss of the scores."""
    q, k = (x.detach().requires_grad_() for x in (q, k))
    rotated_q, rotated_k = rotate(q, k)
    scores = _scores(rotated_q[few].double(), rotated_k[few].double())
    # A nonlinear loss, so that the gradient of q' depends on k', as in attention.
    loss = (scores / q.shape[-1] ** 0.5).tanh().sum()
    gradients = torch.autograd.grad(loss, [q, k, *angles])
    parts = {"scores": scores, "gradient of q": gradients[0][few]}
    parts["gradient of k"] = gradients[1][few]
    for number, gradient in enumerate(gradients[2:]):
        parts[f"gradient of angles {number}"] = gradient
    return {part: value.detach().double() for part, value in parts.items()}


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Return scores between tokens at a few distances, because 8k x 8k scores are too many."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    tokens = q.shape[2]
    distances = sorted({d % tokens for d in (0, 1, 2, tokens // 7, tokens // 3, tokens // 2, -1)})
    return torch.stack([(q * k.roll(-distance, 2)).sum(-1) for distance in distances])


def _outputs_and_gradients(
    module: nn.Module, inputs: Sequence[Tensor], cast: Cast, few: list[int]
) -> dict[str, Tensor]:
    """Return inference outputs and training gradients of the samples ``few``, by part."""
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
    """Backpropagate a loss of these samples in which every output has another weight."""
    some = outputs[few].float()
    weights = torch.linspace(-1, 1, some.numel(), device=some.device).reshape(some.shape)
    (some.tanh() * weights).sum().backward()


def _rows(tensor: Tensor, few: list[int], batch: int) -> Tensor:
    """Return some rows of a batch; tensors shared by the batch, such as (T, N), are unchanged."""
    per_sample = tensor.ndim > 2 and tensor.shape[0] == batch
    return (tensor[few] if per_sample else tensor).detach()


def _no_cast(like: Tensor) -> Cast:
    return lambda: torch.autocast(like.device.type, enabled=False)


def _error(found: Tensor, expected: Tensor) -> float:
    scale = expected.norm()
    return float((found - expected).norm() / torch.where(scale > 0, scale, 1.0))
