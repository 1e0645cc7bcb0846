"""Bits of tokens: sums that do not depend on batches, and bins of positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.data.batches import IGNORED
from comrope.experiments.tasks.token_scores import TokenScores, position_edges, windows

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [1, 2, 3, 100, 2048, 65536])
def test_bins_cover_every_position_once(length):
    edges = position_edges(length)
    assert edges == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, length)
    assert len(edges) <= 4 * math.log2(length) + 3
    assert (TokenScores(length, CPU).bins.diff() >= 0).all()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_sums_are_those_of_a_loop(batch):
    length, text_bytes = 20, 150
    logits = 5 * torch.randn(8, length, 11)
    targets = torch.randint(11, (8, length))
    targets[-1, 7:] = IGNORED
    scores = TokenScores(length, CPU)
    for first in range(0, 8, batch):
        scores.add(logits[first : first + batch], targets[first : first + batch])
    found = scores.result(create_accelerator("cpu"), None, text_bytes)
    bits = [
        [
            -float(logits[row, place].double().log_softmax(-1)[targets[row, place]]) / math.log(2)
            for row in range(8)
            if targets[row, place] != IGNORED
        ]
        for place in range(length)
    ]  # fmt: skip
    every = [each for some in bits for each in some]
    assert found["bits_per_byte"] == pytest.approx(sum(every) / text_bytes)
    assert found["perplexity"] == pytest.approx(2 ** (sum(every) / len(every)))
    edges = position_edges(length)
    for first, last, mean in zip(edges, edges[1:], found["bits_by_position"], strict=False):
        own = [each for some in bits[first:last] for each in some]
        assert mean == pytest.approx(sum(own) / len(own), abs=1e-5)


def test_a_bin_without_targets_has_no_bits():
    scores = TokenScores(4, CPU)
    scores.add(torch.zeros(1, 4, 2), torch.tensor([[1, IGNORED, 0, 1]]))
    found = scores.result(create_accelerator("cpu"), None, 1)
    assert found["bits_by_position"] == [1, None, 1, 1]


def test_windows_are_parts_of_stretches():
    stretches = torch.arange(12).view(2, 6)
    assert windows(stretches, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    filled = nn.functional.pad(stretches, (0, 2), value=IGNORED)
    assert windows(stretches, 4).tolist() == filled.view(4, 4).tolist()
    assert windows(stretches, 9).shape == (2, 9)
