"""Generated tokens: those without a cache, drawn by their probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import raises_for
from support.gpts import CASES, VOCABULARY, nano, text


@pytest.mark.parametrize(("position", "options"), CASES)
def test_generate_with_a_cache_equals_generate_without(position, options):
    model, tokens = nano(position, **options), text(2, 17)
    greedy = model.generate(tokens, 12)
    assert torch.equal(greedy[:, :17], tokens)
    assert torch.equal(model.generate(tokens, 12, use_cache=False), greedy)
    drawn = [
        model.generate(
            tokens, 12, 1.5, generator=torch.Generator().manual_seed(3), use_cache=use_cache
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], greedy)


def test_draws_follow_the_probabilities():
    """Of one token, by the logits of a model without positions."""
    model = nano("none")
    tokens = torch.full((4000, 1), 3)
    logits = model(tokens[:1])[0, 0].detach()
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 5), (1.0, VOCABULARY)):
        drawn = model.generate(tokens, 1, temperature, top_k, generator)[:, 1]
        shares = drawn.bincount(minlength=VOCABULARY).double() / len(drawn)
        kept = logits if top_k is None else logits.where(logits >= logits.topk(top_k)[0][-1], -1e9)
        assert (shares - (kept / temperature).softmax(0)).abs().max() < 0.04
    best = model.generate(tokens[:3], 4)
    for options in ({"temperature": 1.0, "top_k": 1}, {"temperature": 1e-4}):
        assert torch.equal(model.generate(tokens[:3], 4, **options), best)


def test_the_stop_token():
    model, tokens = nano(), text(4, 6)
    free = model.generate(tokens, 20)
    stop = int(free[0, 8])
    for use_cache in (True, False):
        found = model.generate(tokens, 20, stop_token=stop, use_cache=use_cache)
        for row, whole in zip(found, free, strict=True):
            new, wanted = row[6:].tolist(), whole[6:].tolist()
            end = wanted.index(stop) if stop in wanted else len(wanted)
            assert new[:end] == wanted[: min(end, len(new))]
            assert set(new[end:]) <= {stop}
    alone = model.generate(tokens[:1], 20, stop_token=stop)
    assert alone.shape[1] == 6 + free[0, 6:].tolist().index(stop) + 1


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": VOCABULARY + 1}, "top_k"),
        ({"stop_token": VOCABULARY}, "stop_token"),
        ({"stop_token": -1}, "stop_token"),
    ],
)
def test_errors_of_generate_name_the_argument(options, argument):
    with raises_for(argument):
        nano().generate(**{"tokens": text(1, 3), "max_new_tokens": 2, **options})


def test_generate_from_weights_that_diverged():
    model, tokens = nano(), text(1, 3)
    assert torch.equal(model.generate(tokens, 0), tokens)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with raises_for("model"):
        model.generate(tokens, 2)
