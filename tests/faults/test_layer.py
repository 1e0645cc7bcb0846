"""Any inputs of the layer (Hypothesis): scores and gradients of float64, or an error by name.

The float64 reference is a product with ``rotation_matrices``. Views, dtypes, grad modes, entry
points and sizes are drawn together, because an error may need two of them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import comrope

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAMES = (
    "method", "num_heads", "head_dim", "num_axes", "block_size", "init", "channel_order",
    "backend", "q", "k", "x", "qkv", "positions", "angles", "num_prefix_tokens", "the module",
)  # fmt: skip
REFUSED = re.compile(rf"^({'|'.join(NAMES)}): ")

# How a tensor (..., T, C) lies in memory: the shape of its base, and the view of it.
VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "contiguous": (lambda s: s, lambda x: x),
    "transposed": (lambda s: (*s[:-2], s[-1], s[-2]), lambda x: x.mT),
    "first axes exchanged": (lambda s: (s[1], s[0], *s[2:]), lambda x: x.transpose(0, 1)),
    "expanded": (lambda s: (1, *s[1:]), lambda x: x),
    "flipped": (lambda s: s, lambda x: x.flip(-2)),
    "every second": (lambda s: (*s[:-1], 2 * s[-1]), lambda x: x[..., ::2]),
    "sliced": (lambda s: (*s[:-2], s[-2] + 3, s[-1] + 1), lambda x: x[..., 2:-1, 1:]),
}
MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def one_of(choices: Any) -> Any:
    return st.sampled_from(list(choices))


CASES = st.fixed_dictionaries({
    "method": one_of(comrope.METHODS),
    "num_axes": st.integers(1, 4),
    "block_size": one_of([2, 3, 4, 8, 16]),
    "blocks": one_of([12, 12, 12, 6, 4, 1]),
    "heads": st.integers(1, 3),
    "groups": st.integers(1, 3),
    "init": one_of(["normal", "zeros", "rope", "isotropic"]),
    "channel_order": one_of(["interleaved", "interleaved", "half"]),
    "backend": one_of(["auto", "auto", "auto", "reference", "spectral"]),
    "module": one_of(DTYPES),
    "dtypes": st.tuples(
        one_of(DTYPES), one_of(DTYPES), one_of([*DTYPES, torch.int64, torch.uint8])
    ),
    "views": st.tuples(one_of(VIEWS), one_of(VIEWS), one_of(VIEWS)),
    "batch": st.integers(0, 3),
    "tokens": st.integers(0, 9),
    "positions": one_of(["shared", "per sample", "one sample"]),
    "prefix": one_of([0, 0, 1, 2]),
    "prefix_rows": st.booleans(),
    "call": one_of(["forward", "one by one", "packed", "precomputed", "back and forth", "copied"]),
    "mode": one_of(MODES),
    "seed": st.integers(0, 2**16),
})  # fmt: skip


class Inputs:
    """The tensors of a case, in its dtypes, and in float64 with the same values."""

    def __init__(self, case: dict[str, Any]) -> None:
        dim, heads = case["blocks"] * case["block_size"], case["heads"]
        batch, tokens = case["batch"], case["tokens"]
        rows = tokens if case["prefix_rows"] else max(tokens - case["prefix"], 0)
        samples = {"shared": (), "per sample": (batch,), "one sample": (1,)}[case["positions"]]
        shapes = [
            (batch, heads * case["groups"], tokens, dim),
            (batch, heads, tokens, dim),
            (*samples, rows, case["num_axes"]),
        ]
        self.shapes, self.views, self.bases = shapes, case["views"], []
        for shape, view, dtype in zip(shapes, self.views, case["dtypes"], strict=True):
            values = torch.randn(VIEWS[view][0](shape) if len(shape) > 2 else shape)
            if not dtype.is_floating_point:
                values = 3 * values.abs()
            self.bases.append(values.to(dtype))

    def tensors(self, bases: list[Tensor]) -> list[Tensor]:
        """Return q, k and positions as views of these bases."""
        views = zip(bases, self.views, self.shapes, strict=True)
        return [
            VIEWS[view][1](x).expand(shape) if len(shape) > 2 else x for x, view, shape in views
        ]


def require_name(error: Exception) -> None:
    assert REFUSED.match(str(error)), error


def build(case: dict[str, Any]) -> comrope.RotaryEmbedding:
    rope = comrope.RotaryEmbedding(
        case["method"],
        num_heads=case["heads"],
        head_dim=case["blocks"] * case["block_size"],
        num_axes=case["num_axes"],
        block_size=case["block_size"],
        init=case["init"],
        channel_order=case["channel_order"],
        backend=case["backend"],
        num_prefix_tokens=case["prefix"],
        dtype=case["module"],
    )
    return pickle.loads(pickle.dumps(copy.deepcopy(rope))) if case["call"] == "copied" else rope


def rotated(rope: comrope.RotaryEmbedding, case: dict[str, Any], q: Any, k: Any, x: Any) -> Any:
    """Rotated q and k, by one of the ways to call the layer."""
    call = case["call"]
    if call in ("forward", "copied"):
        return rope(q, k, x)
    angles = rope.angles()
    if call == "precomputed":
        return rope(q, k, x, angles=angles)
    if call == "packed":
        with torch.autocast("cpu", enabled=False):
            packed = torch.cat((q, k.to(q.dtype), k.to(q.dtype)), dim=1).transpose(1, 2)
        return rope.rotate_qkv(packed, x, angles=angles)[:2]
    if call == "back and forth":
        there = rope.rotate(q, x, angles=angles)
        q = rope.rotate(there, x, inverse=True, angles=angles)
    return rope.rotate(q, x, angles=angles), rope.rotate(k, x, angles=angles)


def scores_of(q: Tensor, k: Tensor, groups: int) -> Tensor:
    return q @ k.repeat_interleave(groups, dim=1).mT


def expected_scores(rope: Any, case: dict[str, Any], q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """Scores by matrices R(x), in float64."""
    prefix, tokens, size = case["prefix"], case["tokens"], case["block_size"]
    own = rope.rotation_matrices(x)[..., max(x.shape[-2] - (tokens - prefix), 0) :, :, :, :, :]
    first = torch.eye(size, dtype=torch.float64).expand(*own.shape[:-5], prefix, *own.shape[-4:])
    matrices = torch.cat((first, own), dim=-5)
    matrices = matrices if matrices.ndim == 6 else matrices[None]
    outputs = []
    for vectors in (q, k):
        if case["channel_order"] == "half":
            vectors = vectors.unflatten(-1, (2, -1)).mT.flatten(-2)
        blocks = vectors.unflatten(-1, (-1, size)).unflatten(1, (case["heads"], -1))
        outputs.append(
            torch.einsum("bthmij,bhgtmj->bhgtmi", matrices.expand(len(q), *matrices.shape[1:]),
                         blocks).flatten(1, 2).flatten(-2)
        )  # fmt: skip
    return scores_of(*outputs, case["groups"])


def gradients(scores: Tensor, weights: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad((scores.double() * weights).sum(), inputs, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g.double() for g, x in zip(found, inputs, strict=True)
    ]


def check(case: dict[str, Any]) -> None:
    """Compare a case with float64, unless it is refused by name."""
    torch.manual_seed(case["seed"])
    inputs = Inputs(case)
    try:
        rope = build(case)
    except ValueError as error:
        require_name(error)
        event("refused at construction")
        return
    learns = case["mode"] in ("grad", "autocast")
    bases = [x.requires_grad_(learns and x.is_floating_point()) for x in inputs.bases]
    # Angles are float32 at least, so a narrow module is compared with its own parameters.
    exact = copy.deepcopy(rope).double()
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in bases]
    try:
        with MODES[case["mode"]]():
            got = rotated(rope, case, *inputs.tensors(bases))
    except ValueError as error:
        require_name(error)
        event("refused in the call")
        assert case["tokens"] < case["prefix"]
        return
    event("compared")
    q, k, x = inputs.tensors(wide)
    expected = expected_scores(exact, case, q, k, x)
    with torch.autocast("cpu", enabled=False):
        found = scores_of(*(t.double() for t in got), case["groups"])
    assert got[0].dtype == case["dtypes"][0]
    assert found.shape == expected.shape
    lengths = [t.detach().norm(dim=-1, keepdim=True) for t in (q, k)]
    lengths = scores_of(*lengths, case["groups"])
    all_wide = all(t == torch.float64 for t in (*case["dtypes"][:2], case["module"]))
    computed = torch.finfo(torch.float64 if all_wide else torch.float32).eps
    narrowest = max(torch.finfo(t.dtype).eps for t in got)
    reach = 1 + float(x.detach().abs().max()) * rope.num_axes if x.numel() else 1.0
    tolerance = 4 * narrowest + 50 * reach * computed
    assert not ((found - expected).abs() > tolerance * lengths + 1e-30).any()
    if not learns or not found.numel():
        return
    weights = torch.randn(expected.shape, dtype=torch.float64)
    leaves = [x for x in bases if x.requires_grad] + list(rope.parameters())
    others = [x for x in wide if x.requires_grad] + list(exact.parameters())
    natural = float((weights.abs() * lengths).sum())
    pairs = zip(
        leaves, gradients(found, weights, leaves), gradients(expected, weights, others), strict=True
    )
    for leaf, ours, theirs in pairs:
        assert ours.isfinite().all()
        scale = max(natural * reach, float(theirs.norm()))
        within = 20 * tolerance + 4 * torch.finfo(leaf.dtype).eps
        assert float((ours - theirs).norm()) <= within * scale * math.sqrt(rope.head_dim)


def more(x: Tensor, dim: int) -> Tensor:
    """One more entry than in x, along a dimension."""
    return torch.zeros([size + (at == dim) for at, size in enumerate(x.shape)], dtype=x.dtype)


def three_rows_more(x: Tensor) -> Tensor:
    for _ in range(3):
        x = more(x, x.ndim - 2)
    return x


# What is wrong with q, k or positions (by their place); each of them can have the first ones.
OF_ANY: dict[str, Callable[[Tensor], Any]] = {
    "on another device": lambda x: x.to("meta"),
    "of float8": lambda x: x.to(torch.float8_e5m2),
    "of complex": lambda x: x.to(torch.complex64),
    "of bool": lambda x: x.bool(),
    "no tensor": lambda x: x.tolist(),
    "with one axis less": lambda x: x.flatten(),
    "with two axes more": lambda x: x[None, None],
    "with one channel more": lambda x: more(x, x.ndim - 1),
    "with three rows more": three_rows_more,
}
FAULTS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    **{f"{n} {f}": (i, spoil) for f, spoil in OF_ANY.items() for i, n in enumerate("qkx")},
    "q of another batch": (0, lambda x: more(x, 0)),
    "k with one head more": (1, lambda x: more(x, 1)),
    "k without heads": (1, lambda x: x[:, :0]),
    "q without heads": (0, lambda x: x[:, :0]),
    "x of another batch": (2, lambda x: torch.zeros(7, *x.shape[-2:])),
    "x with NaN": (2, lambda x: torch.cat((x[..., :-1].float(), x[..., -1:] * torch.nan), dim=-1)),
    "x with infinity": (2, lambda x: x + torch.inf),
}


def check_fault(case: dict[str, Any], fault: str) -> None:
    """Expect that a wrong argument is refused by name."""
    torch.manual_seed(case["seed"])
    try:
        rope = build(case)
    except ValueError:
        return
    inputs = Inputs(case)
    given = [x.contiguous() for x in inputs.tensors(inputs.bases)]
    place, spoil = FAULTS[fault]
    if place == 2 and given[2].numel() == 0 and ("NaN" in fault or "infinity" in fault):
        return
    given[place] = spoil(given[place])
    event(fault)
    with pytest.raises((ValueError, TypeError)) as raised, MODES[case["mode"]]():
        rope(*given)
    assert REFUSED.match(str(raised.value)), raised.value


PROFILE: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


@given(CASES)
@settings(**PROFILE, max_examples=150, phases=[Phase.generate])
def test_any_inputs_agree_with_float64_or_are_refused(case):
    check(case)


@pytest.mark.slow
@given(CASES)
@settings(**PROFILE, max_examples=2500)
def test_many_inputs_agree_with_float64_or_are_refused(case):
    check(case)


@pytest.mark.parametrize("fault", FAULTS)
@given(CASES)
@settings(**PROFILE, max_examples=8, phases=[Phase.generate])
def test_a_wrong_argument_is_refused_by_name(fault, case):
    check_fault(case, fault)


@pytest.mark.slow
@given(CASES, one_of(FAULTS))
@settings(**PROFILE, max_examples=2500)
def test_many_wrong_arguments_are_refused_by_name(case, fault):
    check_fault(case, fault)
