"""Sequences of tokens: every sequence once a pass, every token a target once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers import raises_for
from support.text import Texts

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import IGNORED, Key, TrainBatches
from comrope.experiments.data.corpus import CACHE, Corpus, open_corpus
from comrope.experiments.data.sequences import Sequences, Stretches, collate_tokens
from comrope.experiments.data.tokenizers import Bytes

CONTEXT = 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Documents of 915 tokens, in which no sequence appears twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(tmp_path_factory.mktemp("cache")))
        texts = [random.Random(size).randbytes(size) for size in (200, 201, 256, 253)]
        found = open_corpus(Texts(texts), Bytes())
    assert len(found) == 915
    return found


def place_of(sequence: np.ndarray, everything: np.ndarray) -> int:
    windows = np.lib.stride_tricks.sliding_window_view(everything, len(sequence))
    (place,) = np.flatnonzero((windows == sequence).all(1))
    return int(place)


def test_a_pass_has_every_sequence_once(corpus):
    everything = corpus.read(0, len(corpus))
    source, cuts, orders = Sequences(corpus, CONTEXT, seed=0), set(), set()
    assert len(source) == 90
    for epoch in range(4):
        items = [source[Key(epoch, n, n)] for n in range(len(source))]
        assert {item.shape for item in items} == {(CONTEXT + 1,)}
        places = [place_of(item, everything) for item in items]
        cut = min(places)
        assert sorted(places) == list(range(cut, cut + 90 * CONTEXT, CONTEXT))
        cuts.add(cut)
        orders.add(tuple((place - cut) // CONTEXT for place in places))
    assert len(cuts) > 1
    assert len(orders) == 4


def test_an_epoch_may_be_a_part_of_a_pass(corpus):
    whole, part = (Sequences(corpus, CONTEXT, seed=3, epoch=n) for n in (0, 40))
    assert len(part) == 40
    one_after_the_other = [part[Key(n // 40, n % 40, n % 40)] for n in range(180)]
    for number, item in enumerate(one_after_the_other):
        expected = whole[Key(number // 90, number % 90, number % 90)]
        assert np.array_equal(item, expected)


def test_sequences_depend_on_the_seed_only(corpus):
    def order(seed: int) -> list[list[int]]:
        source = Sequences(corpus, CONTEXT, seed)
        return [source[Key(1, n, n)].tolist() for n in range(20)]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_batches_of_processes_are_shares_of_the_same(corpus):
    source = Sequences(corpus, CONTEXT, seed=0, epoch=32)
    options = {"batch_size": 8, "epochs": 2, "seed": 0}
    whole = [[source[key].tolist() for key in batch] for batch in TrainBatches(32, **options)]
    shares = [
        [[source[key].tolist() for key in batch] for batch in TrainBatches(
            32, **options, process=n, processes=2)]
        for n in range(2)
    ]  # fmt: skip
    assert [one + other for one, other in zip(*shares, strict=True)] == whole


@pytest.mark.parametrize("length", [1, 7, 64, 457, 914, 2000])
def test_every_token_but_the_first_is_a_target_once(corpus, length):
    source = Stretches(corpus, length)
    items = [source[Key(0, n, n)] for n in range(len(source))]
    batch = collate_tokens(items)
    targets = batch.targets.flatten()
    assert targets[targets != IGNORED].tolist() == corpus.read(1, len(corpus) - 1).tolist()
    assert source.targets == 914
    known = batch.targets != IGNORED
    assert (batch.inputs[known] != IGNORED).all()
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    padding = source[Key(0, -1, len(source) - 1)]
    assert (padding == IGNORED).all()


def test_a_text_that_is_too_short_is_refused(corpus):
    assert len(Sequences(corpus, 457, seed=0)) == 1
    with raises_for("language.context", UserError, naming="457"):
        Sequences(corpus, 458, seed=0)
