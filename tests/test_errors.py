"""Bad input: the error names the argument, what came and what was expected."""

from __future__ import annotations

import pytest
import torch

import comrope

GOOD = {"num_heads": 2, "head_dim": 16, "num_axes": 2, "block_size": 4}


def build(method="comrope-ld", **changes):
    return comrope.RotaryEmbedding(method, **{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "ropee"}, "method: expected one of rope, .*, got 'ropee'"),
        (
            {"init": "ones"},
            "init: expected one of normal, zeros, .*, scattered, got 'ones'",
        ),
        ({"backend": "cuda"}, "backend: expected one of auto, .*, triton, got 'cuda'"),
        ({"method": "liere", "backend": "spectral"}, "backend: 'spectral' needs .* commute"),
        ({"channel_order": "neox"}, "channel_order: expected one of interleaved, half, got 'neox'"),
        ({"num_heads": 0}, "num_heads: expected an integer of at least 1, got 0"),
        ({"num_axes": 1.5}, "num_axes: expected an integer of at least 1, got 1.5"),
        ({"block_size": 1}, "block_size: expected an integer of at least 2, got 1"),
        ({"block_size": 5}, "block_size: expected a divisor of head_dim 16, got 5"),
        ({"method": "comrope-ap", "num_axes": 3}, "head_dim: .*multiple of num_axes 3.* = 4"),
        ({"method": "rope", "num_axes": 3}, "head_dim: method 'rope' .*multiple of num_axes 3"),
        ({"init": "rope", "num_axes": 3}, "head_dim: init 'rope' .*multiple of num_axes 3"),
        ({"init": "rope", "base": 0.0}, "base: expected a positive finite number, got 0.0"),
        ({"init": "rope", "base": "1"}, "base: expected a positive finite number, got '1'"),
        ({"init": "rope", "position_scale": (1.0,)}, "position_scale: expected one number or 2, g"),
        ({"init": "rope", "position_scale": -1.0}, "position_scale: expected a positive finite"),
        ({"frequencies": [1.0]}, "frequencies: expected None, since only .* \\[1.0\\]"),
        ({"init": "rope", "frequencies": [1.0]}, "frequencies: expected 4, one a plane.*, got 1"),
        ({"init": "rope", "frequencies": [1.0], "base": 9.0}, "base: expected None beside"),
        (
            {"base": 100.0},
            "base: expected None, since only method 'rope' and the inits .* 100.0",
        ),
        ({"position_scale": 14.0}, "position_scale: expected None, since only .*, got 14.0"),
        ({"num_prefix_tokens": -1}, "num_prefix_tokens: expected an integer of at least 0, got -1"),
        ({"num_prefix_tokens": 1.0}, "num_prefix_tokens: expected an integer of at least 0"),
        (
            {"head_dim": 15, "block_size": 5, "channel_order": "half"},
            "head_dim: channel_order 'half' needs an even one, got 15",
        ),
    ],
)
def test_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize(("method", "option"), [("rope", "shared_theta"), ("comrope-ld", "thetas")])
def test_unknown_options_are_refused(method, option):
    with pytest.raises(TypeError, match=f"{option}: expected an option of method '{method}'"):
        build(method, **{option: True})


def call(q=(1, 2, 6, 16), k=(1, 2, 6, 16), positions=(6, 2), **options):
    tensors = [torch.zeros(x) if isinstance(x, tuple) else x for x in (q, k, positions)]
    return build()(*tensors, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": (2, 6, 16)}, r"q: expected shape \(B, H, T, D\), got \(2, 6, 16\)"),
        ({"k": (1, 1, 2, 6, 16)}, r"k: expected shape \(B, H, T, D\), got \(1, 1, 2, 6, 16\)"),
        ({"q": (1, 2, 6, 8)}, "q: expected head_dim 16, got 8"),
        ({"q": torch.zeros(1, 2, 6, 16).long()}, "q: expected a floating dtype, got torch.int64"),
        ({"k": (1, 4, 6, 16)}, r"k: expected num_heads 2 heads .* in shape \(B, H, T, D\), got 4"),
        ({"q": (1, 3, 6, 16)}, "q: expected a multiple of 2 heads, got 3"),
        ({"k": (1, 2, 5, 16)}, "k: expected the batch and length of q"),
        ({"k": (3, 2, 6, 16)}, "k: expected the batch and length of q"),
        (
            {"positions": (6,)},
            r"positions: expected shape .*, got \(6,\); for one axis use \[:, None\]",
        ),
        ({"positions": (6, 3)}, "positions: expected num_axes 2 in the last dimension, got 3"),
        ({"positions": (5, 2)}, r"positions: expected 6 rows, one a token, got 5 \(class token\?"),
        ({"positions": (7, 2)}, "positions: expected 6 rows, one a token, got 7$"),
        ({"positions": (4, 6, 2)}, "positions: expected the batch size of q, 1, got 4"),
        (
            {"positions": (3, 2), "num_prefix_tokens": 1},
            "positions: expected 5 rows after 1 prefix tokens, got 3",
        ),
        ({"num_prefix_tokens": 7}, "num_prefix_tokens: expected 0 to 6, .* got 7"),
        ({"positions": torch.full((6, 2), float("nan"))}, "positions: expected finite .* NaN"),
        ({"positions": torch.full((6, 2), float("inf"))}, "positions: expected finite"),
        ({"positions": torch.zeros(6, 2, dtype=torch.complex64)}, "positions: expected real"),
    ],
)
def test_calls(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**arguments)


def test_positions_that_are_no_tensor():
    with pytest.raises(TypeError, match="positions: expected a tensor, got list"):
        call(positions=[[0.0, 0.0]] * 6)


def test_queries_that_are_no_tensor():
    with pytest.raises(TypeError, match="q: expected a tensor, got list"):
        call(q=[1.0])


def test_a_diverged_matrix_gives_nan_and_not_a_crash():
    """As the other methods do, so that a loss scaler or a human sees it in the loss."""
    for bad in (float("nan"), float("inf")):
        rope = build()
        with torch.no_grad():
            rope.method.P[0, 0, 0, 1] = bad
        q = rope(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), torch.rand(3, 2))[0]
        assert q[0, 0, :, :4].isnan().all()
        assert q[0, 0, :, 4:].isfinite().all()
        assert q[0, 1].isfinite().all()


def test_liere_says_why_it_has_no_spectrum():
    with pytest.raises(ValueError, match=r"spectrum: these 2 angle matrices do not commute"):
        build("liere").spectrum()
    build("liere", num_axes=1).spectrum()


def test_backend_changed_to_nonsense_after_construction():
    rope = build()
    rope.backend = "fast"
    with pytest.raises(ValueError, match="backend: expected one of"):
        rope(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), torch.zeros(1, 2))
