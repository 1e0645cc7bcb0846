"""Bad input: the error names the argument."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for

import comrope

GOOD = {"num_heads": 2, "head_dim": 16, "num_axes": 2, "block_size": 4}


def build(method="comrope-ld", **changes):
    return comrope.RotaryEmbedding(method, **{**GOOD, **changes})


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("method", {"method": "ropee"}),
        ("init", {"init": "ones"}),
        ("backend", {"backend": "cuda"}),
        ("backend", {"method": "liere", "backend": "spectral"}),
        ("channel_order", {"channel_order": "neox"}),
        ("axis_order", {"axis_order": "random"}),
        ("num_heads", {"num_heads": 0}),
        ("num_axes", {"num_axes": 1.5}),
        ("block_size", {"block_size": 1}),
        ("block_size", {"block_size": 5}),  # no divisor of head_dim
        ("head_dim", {"method": "comrope-ap", "num_axes": 3}),  # axes cannot share four blocks
        ("head_dim", {"method": "rope", "num_axes": 3}),
        ("head_dim", {"init": "rope", "num_axes": 3}),
        ("head_dim", {"head_dim": 15, "block_size": 5, "channel_order": "half"}),
        ("base", {"init": "rope", "base": 0.0}),
        ("base", {"init": "rope", "base": "1"}),
        ("base", {"base": 100.0}),  # of a start that has none
        ("base", {"init": "rope", "frequencies": [1.0] * 4, "base": 9.0}),
        ("position_scale", {"init": "rope", "position_scale": (1.0,)}),
        ("position_scale", {"init": "rope", "position_scale": -1.0}),
        ("position_scale", {"position_scale": 14.0}),
        ("frequencies", {"frequencies": [1.0]}),
        ("frequencies", {"init": "rope", "frequencies": [1.0]}),
        ("num_prefix_tokens", {"num_prefix_tokens": -1}),
    ],
)
def test_construction(argument, changes):
    with raises_for(argument):
        build(**changes)


@pytest.mark.parametrize(("method", "option"), [("rope", "shared_theta"), ("comrope-ld", "thetas")])
def test_unknown_options_are_refused(method, option):
    with raises_for(option, TypeError):
        build(method, **{option: True})


def call(q=(1, 2, 6, 16), k=(1, 2, 6, 16), positions=(6, 2), **options):
    tensors = [torch.zeros(x) if isinstance(x, tuple) else x for x in (q, k, positions)]
    return build()(*tensors, **options)


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("q", {"q": (2, 6, 16)}),
        ("q", {"q": (1, 2, 6, 8)}),
        ("q", {"q": torch.zeros(1, 2, 6, 16).long()}),
        ("q", {"q": (1, 3, 6, 16)}),
        ("k", {"k": (1, 4, 6, 16)}),
        ("k", {"k": (1, 2, 5, 16)}),
        ("k", {"k": (3, 2, 6, 16)}),
        ("positions", {"positions": (6,)}),
        ("positions", {"positions": (6, 3)}),
        ("positions", {"positions": (5, 2)}),
        ("positions", {"positions": (4, 6, 2)}),
        ("positions", {"positions": (3, 2), "num_prefix_tokens": 1}),
        ("positions", {"positions": torch.full((6, 2), float("inf"))}),
        ("positions", {"positions": torch.zeros(6, 2, dtype=torch.complex64)}),
        ("num_prefix_tokens", {"num_prefix_tokens": 7}),
    ],
)
def test_calls(argument, arguments):
    with raises_for(argument):
        call(**arguments)


@pytest.mark.parametrize("argument", ["q", "positions"])
def test_arguments_that_are_no_tensors(argument):
    with raises_for(argument, TypeError):
        call(**{argument: [1.0]})


@pytest.mark.parametrize(
    ("shape", "positions", "hint"),
    [
        ((1, 6, 2, 16), (6, 2), r"k\.transpose\(1, 2\)"),  # tokens before heads
        ((1, 2, 6, 16), (5, 2), "with_class_token"),
        ((1, 2, 6, 16), (6,), r"\[:, None\]"),
    ],
)
def test_messages_name_the_way_out(shape, positions, hint):
    with pytest.raises(ValueError, match=hint):
        call(torch.zeros(shape), torch.zeros(shape), torch.zeros(positions))


def test_a_diverged_matrix_gives_nan_and_not_a_crash():
    """As the other methods do, so that a loss scaler or a human sees it in the loss."""
    for bad in (float("nan"), float("inf")):
        rope = build()
        with torch.no_grad():
            rope.method.P[0, 0, 0, 1] = bad
        q = rope(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), torch.rand(3, 2))[0]
        assert q[0, 0, :, :4].isnan().all()
        assert q[0, 1].isfinite().all()


def test_liere_has_no_spectrum_on_two_axes():
    with raises_for("spectrum"):
        build("liere").spectrum()
    build("liere", num_axes=1).spectrum()


def test_backend_changed_to_nonsense_after_construction():
    rope = build()
    rope.backend = "fast"
    with raises_for("backend"):
        rope(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), torch.zeros(1, 2))
