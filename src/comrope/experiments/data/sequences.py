"""Sequences of tokens: packed for training, and stretches of the validation text.

Sequences are cut from the joined documents (see ``Corpus``), whatever lies in them. Sequence and
stretch overlap with the next one by one token: each token but the first is a target once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import derive
from comrope.experiments.data.batches import IGNORED, Batch, Key
from comrope.experiments.data.corpus import Corpus

__all__ = ["Sequences", "Stretches", "collate_tokens"]


class Sequences(Dataset[Any]):
    """Training sequences of a corpus.

    A pass over the corpus has every sequence once, in a random order. The cuts of each pass are at
    other places. An epoch may be only a part of a pass; the next epoch continues it.

    Args:
        corpus: The text.
        context: Tokens of the input of a sequence.
        seed: Determines cuts and order, together with the number of the pass.
        epoch: Sequences of an epoch; 0 for all of a pass.

    Raises:
        UserError: The text is too short.
    """

    def __init__(self, corpus: Corpus, context: int, seed: int, epoch: int = 0) -> None:
        self.corpus, self.context, self.seed = corpus, context, seed
        self.count = len(corpus) // context - 1  # for any place of the first cut
        if self.count < 1:
            raise UserError(
                f"language.context: expected at most {len(corpus) // 2}, half of the "
                f"{len(corpus)} training tokens, got {context}"
            )
        self.epoch = epoch or self.count

    def __len__(self) -> int:
        return self.epoch

    def __getitem__(self, key: Key) -> np.ndarray:
        """Return the tokens of a sequence, (context + 1,)."""
        number, index = divmod(key.epoch * self.epoch + key.sample, self.count)
        cut, step, start = _order(self.seed, number, self.count, self.context)
        place = (step * index + start) % self.count
        return self.corpus.read(cut + place * self.context, self.context + 1)


@functools.lru_cache
def _order(seed: int, number: int, count: int, context: int) -> tuple[int, int, int]:
    """Return the first cut of a pass, and its order ``step * index + start`` modulo ``count``."""
    step = 1 + derive(seed, "stride", number) % count
    while math.gcd(step, count) > 1:
        step += 1
    start = derive(seed, "start", number) % count
    return derive(seed, "cut", number) % context, step, start


class Stretches(Dataset[Any]):
    """A validation text in stretches, by ``Key``.

    Args:
        corpus: The text.
        length: Tokens of a stretch. The last one is filled up with ignored targets.
        about: Facts about the text, for results.
    """

    def __init__(self, corpus: Corpus, length: int, about: Mapping[str, Any] | None = None) -> None:
        self.corpus, self.length, self.about = corpus, length, about

    @property
    def targets(self) -> int:
        """The number of targets: all tokens but the first, which is an end token."""
        return len(self.corpus) - 1

    def __len__(self) -> int:
        return -(-self.targets // self.length)

    def __getitem__(self, key: Key) -> np.ndarray:
        """Return the tokens of a stretch, (length + 1,); ``IGNORED`` after the end."""
        found = np.full(self.length + 1, IGNORED, dtype=np.int64)
        if key.place >= 0:
            first = key.sample * self.length
            count = min(self.length + 1, len(self.corpus) - first)
            found[:count] = self.corpus.read(first, count)
        return found


def collate_tokens(items: list[np.ndarray]) -> Batch:
    """Return a batch of tokens (B, T) and of the tokens after each of them (B, T)."""
    tokens: Tensor = torch.from_numpy(np.stack(items))
    return Batch(tokens[:, :-1], tokens[:, 1:])
