"""The cache of rotated keys: logits are those without it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import raises_for, relative_error
from support.gpts import CASES, CONTEXT, VOCABULARY, nano, text

from comrope.models import GPT
from comrope.models.attention import log_temperature

# Lengths of chunks. The first has more tokens than channels: its basis is folded into the weights.
CHUNKS = (17, 1, 1, 5, 1, 2)


def in_chunks(model: GPT, tokens: torch.Tensor, chunks=CHUNKS) -> torch.Tensor:
    """The logits (B, T, V), with a cache that was not empty memory before."""
    cache = model.new_cache(len(tokens), sum(chunks) + 3)
    for keys, values in cache.layers:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    parts = [model(part, cache=cache) for part in tokens.split(list(chunks), dim=1)]
    assert cache.length == sum(chunks)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("position", "options"), CASES)
def test_chunks_of_any_length_have_the_logits_of_the_whole(position, options, backend):
    if position == "none" and backend != "auto":
        pytest.skip("without a rotation there is no backend")
    chosen = {} if position == "none" else {"backend": backend}
    model, tokens = nano(position, **options, **chosen), text(2, sum(CHUNKS))
    expected = model(tokens)
    assert relative_error(in_chunks(model, tokens), expected) < 1e-12
    assert relative_error(in_chunks(model, tokens, (1,) * len(tokens[0])), expected) < 1e-12


@pytest.mark.parametrize(
    "position",
    ["comrope-torus", *(pytest.param(p, marks=pytest.mark.slow) for p in ("comrope-ld", "rope"))],
)
def test_kernels_have_the_same_cache(position):
    """Interpreted on a CPU."""
    pytest.importorskip("triton")
    options = {"dtype": torch.float32, "rotate_values": True, "num_kv_heads": 2, "depth": 1}
    model, tokens = nano(position, backend="triton", **options), text(1, 5)
    assert relative_error(in_chunks(model, tokens, (3, 1, 1)), model(tokens)) < 1e-4


@pytest.mark.parametrize("position", ["comrope-ld", "comrope-torus"])
def test_repeated_frequencies_do_not_mix_bases(position):
    """Where frequencies repeat, another eigendecomposition may give another basis."""
    model = nano(position, init="rope", base=1.0000001, depth=2)
    model.reset_parameters()
    tokens = text(2, sum(CHUNKS))
    assert relative_error(in_chunks(model, tokens), model(tokens)) < 1e-10


def test_autocast_and_low_precision():
    model, tokens = nano(dtype=torch.float32, rotate_values=True), text(2, sum(CHUNKS))
    expected = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.new_cache(1, 1).layers[0][0].dtype == torch.bfloat16
        assert relative_error(in_chunks(model, tokens).float(), expected) < 0.1
        assert model.generate(tokens, 2).shape == (2, tokens.shape[1] + 2)
    cache = model.new_cache(2, 8)
    with torch.autocast("cpu", torch.bfloat16), raises_for("cache", naming="bfloat16"):
        model(tokens[:, :2], cache=cache)
    model(tokens[:, :2], cache=cache)  # it is unchanged
    low = model.bfloat16()
    assert relative_error(in_chunks(low, tokens).float(), low(tokens).float()) < 0.1


def test_positions_with_a_cache():
    """By default the next indices; otherwise the given ones, also per sample."""
    model, tokens = nano(), text(2, 10)
    places = 40 * torch.rand(2, 10, 1, dtype=torch.float64)
    cache = model.new_cache(2, 10)
    parts = [
        model(tokens[:, first:last], places[:, first:last], cache)
        for first, last in ((0, 4), (4, 5), (5, 10))
    ]
    assert relative_error(torch.cat(parts, 1), model(tokens, places)) < 1e-12


def test_a_cache_can_be_cut_copied_and_used_again():
    model, tokens = nano("comrope-torus"), text(2, 12)
    expected, cache = model(tokens), model.new_cache(2, 12)
    model(tokens[:, :9], cache=cache)
    branch = copy.deepcopy(cache)
    model(text(2, 3), cache=branch)
    cache.length = 5
    assert relative_error(model(tokens[:, 5:], cache=cache), expected[:, 5:]) < 1e-12
    with torch.no_grad():  # an empty cache has no angles of earlier weights
        for block in model.blocks:
            block.attn.rope.method.frequencies.add_(0.3)
    cache.length = 0
    assert relative_error(model(tokens, cache=cache), model(tokens)) < 1e-12


def test_a_cache_needs_no_gradients():
    model, tokens = nano().train(), text(2, 4)
    model.set_grad_checkpointing()
    logits = model(tokens, cache=model.new_cache(2, 4))
    assert not logits.requires_grad
    assert model(tokens).requires_grad


def test_what_does_not_fit_leaves_the_cache_as_it_is():
    model, tokens = nano(), text(2, 5)
    cache = model.new_cache(2, 7)
    first = model(tokens, cache=cache)
    kept = [tensor[:, :, :5].clone() for layer in cache.layers for tensor in layer]
    for argument, call in (
        ("cache", lambda: model(tokens, cache=cache)),  # too short
        ("cache", lambda: model(tokens[:1], cache=cache)),  # another batch
        ("cache", lambda: nano(depth=3)(tokens[:, :1], cache=cache)),
        ("cache", lambda: nano(num_kv_heads=2)(tokens[:, :1], cache=cache)),
        ("tokens", lambda: model(tokens + VOCABULARY, cache=cache)),
        ("positions", lambda: model(tokens[:, :2], torch.rand(3, 1), cache)),
    ):
        with raises_for(argument):
            call()
        assert cache.length == 5
    cache.length = 8
    with raises_for("cache.length"):
        model(tokens[:, :1], cache=cache)
    cache.length = 5
    model(tokens[:, :2], cache=cache)
    for before, after in zip(kept, (t for layer in cache.layers for t in layer), strict=True):
        assert torch.equal(after[:, :, :5], before)
    assert relative_error(first, model(tokens)) < 1e-12
    for options, argument in (((0, 5), "batch_size"), ((2, 0), "max_length")):
        with raises_for(argument):
            model.new_cache(*options)


def test_the_temperature_grows_with_the_logarithm_of_the_visible_tokens():
    visible = torch.arange(1, 400)
    found = log_temperature(visible, 20, torch.float64)
    expected = [max(1.0, math.log(n) / math.log(20)) for n in range(1, 400)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert float(found[399 - 1]) == pytest.approx(2.0, abs=1e-3)  # log 400 / log 20
    assert (found[:20] == 1).all()


def test_the_temperature_has_no_effect_within_the_context():
    sharp, plain = nano(attention_temperature="log"), nano()
    plain.load_state_dict(sharp.state_dict())
    tokens = text(2, CONTEXT + 1)
    assert torch.equal(sharp(tokens)[:, :CONTEXT], plain(tokens)[:, :CONTEXT])
    assert relative_error(sharp(tokens)[:, CONTEXT:], plain(tokens)[:, CONTEXT:]) > 1e-4
