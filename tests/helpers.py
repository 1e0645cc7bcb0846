"""What several test files need: building, scoring, comparing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import comrope
from comrope.analysis import scores
from comrope.angles import plane_generators
from comrope.methods import method_class

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of kernels; interpreted on a CPU
COMMUTING = tuple(name for name in comrope.METHODS if method_class(name).commutes)
LEARNED = tuple(name for name in comrope.METHODS if method_class(name).learns)


def fits(method: str, *, num_axes: int = 2, init: str = "normal") -> bool:
    """Whether a method rotates with this many axes and can start like this."""
    cls = method_class(method)
    can_start = init != "zeros" or cls.starts_at_zero or not cls.learns
    return can_start and cls.only_axes in (None, num_axes)


FROM_ZERO = tuple(name for name in LEARNED if fits(name, init="zeros"))


def make(method: str, **options: Any) -> comrope.RotaryEmbedding:
    """A small embedding: 2 key heads, blocks of 4 that 1 to 4 axes can share, float64."""
    options.setdefault("num_heads", 2)
    options.setdefault("block_size", 4)
    options.setdefault("head_dim", 12 * options["block_size"])
    options.setdefault("dtype", torch.float64)
    return comrope.RotaryEmbedding(method, **options)


def raises_for(argument: str, error: type[Exception] = ValueError, *, naming: str = "") -> Any:
    """Expect an error about an argument.

    Args:
        argument: What the message begins with.
        error: The type.
        naming: A name or value that the message must have too.
    """
    return pytest.raises(error, match=rf"(?s)^{re.escape(argument)}: .*{re.escape(naming)}")


def queries_and_keys(
    rope: comrope.RotaryEmbedding, tokens: int = 6, batch: int = 2, groups: int = 2
) -> tuple[Tensor, Tensor]:
    heads, dim = rope.num_heads, rope.head_dim
    q = torch.randn(batch, heads * groups, tokens, dim, dtype=torch.float64)
    k = torch.randn(batch, heads, tokens, dim, dtype=torch.float64)
    return q.requires_grad_(), k.requires_grad_()


def set_frequencies(rope: comrope.RotaryEmbedding, frequencies: Tensor) -> None:
    """Give every block of a P-parameterised method these frequencies (f,), in a random basis."""
    matrix = rope.method.P
    with torch.no_grad():
        basis = torch.linalg.qr(torch.randn(matrix.shape, dtype=torch.float64))[0]
        planes = plane_generators(frequencies.double(), rope.block_size)
        matrix.copy_(basis @ planes @ basis.mT / 2)


def scores_and_gradients(
    rope: comrope.RotaryEmbedding, q: Tensor, k: Tensor, positions: Tensor, backend: str
) -> dict[str, Tensor]:
    """Scores, and the gradients of a loss of them, by name."""
    rope.backend = backend
    inputs = {"q": q, "k": k, **dict(rope.named_parameters())}
    if positions.requires_grad:
        inputs["positions"] = positions
    value = scores(rope, q, k, positions)
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value)
    # A bent loss: the gradient that reaches q' depends on k', as it does in attention.
    gradients = torch.autograd.grad((value.tanh() * weights).sum(), list(inputs.values()))
    return {"scores": value.detach(), **dict(zip(inputs, gradients, strict=True))}


def assert_parity(
    rope: comrope.RotaryEmbedding, positions: Tensor | None = None, scores_within: float = 1e-12
) -> None:
    """Compare the spectral backend with the reference: scores and all gradients, in float64."""
    if positions is None:
        positions = torch.randn(6, rope.num_axes, dtype=torch.float64)
    q, k = queries_and_keys(rope)
    positions.requires_grad_()
    expected = scores_and_gradients(rope, q, k, positions, "reference")
    got = scores_and_gradients(rope, q, k, positions, "spectral")
    for name, value in expected.items():
        limit = scores_within if name == "scores" else 1e-9
        assert relative_error(got[name], value) <= limit, name


def assert_kernel_parity(
    rope: comrope.RotaryEmbedding,
    positions: Tensor,
    *,
    groups: int = 1,
    tokens: int = 6,
    batch: int = 2,
    within: float = 2e-6,
    order: str | None = None,
) -> None:
    """Compare the kernels in float32 with the reference in float64; ``rope`` becomes float32."""
    q, k = queries_and_keys(rope, tokens=tokens, batch=batch, groups=groups)
    positions = positions.double().requires_grad_()
    expected = scores_and_gradients(rope, q, k, positions, "reference")
    rope.float().to(DEVICE)
    inputs = [x.detach().float().to(DEVICE) for x in (q, k, positions)]
    if order == "tokens":  # as views of a packed projection have it
        inputs[:2] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:2]]
    q, k, positions = (x.requires_grad_() for x in inputs)
    got = scores_and_gradients(rope, q, k, positions, "triton")
    for name, value in expected.items():
        scale = 1.0 if value.norm() > 1e-10 else 1e-3
        error = relative_error(got[name].double().cpu(), value)
        assert error <= within * (1 if name == "scores" else 10) / scale, (name, error)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||; against an expected zero, the plain norm."""
    scale = expected.norm()
    error = (got - expected).norm() / torch.where(scale > 1e-10, scale, 1.0)
    return float(error.detach())


def checkpoint_gradients(model: Any) -> None:
    """By the name that timm has for it, newer versions of transformers, or older ones."""
    names = ("set_grad_checkpointing", "activation_checkpointing_enable")
    getattr(model, next((n for n in names if hasattr(model, n)), "gradient_checkpointing_enable"))()
