"""Bits of the tokens of a text: their sum, and their mean by position in the context."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from comrope.experiments.common.distributed import sum_over_processes
from comrope.experiments.data.batches import IGNORED
from comrope.experiments.tasks.outputs import OutputCheck

__all__ = ["TokenScores", "position_edges", "windows"]

PER_OCTAVE = 4  # bins of positions from any position to twice that
DIGITS = 5  # of the bits of a bin


class TokenScores:
    """Sum the losses of targets in float64, on the device, by bins of their positions.

    Args:
        length: Tokens of a window.
        device: The device of the losses.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        edges = position_edges(length)
        inner = torch.tensor(edges[1:], device=device)
        self.bins = torch.bucketize(torch.arange(length, device=device), inner, right=True)
        self.nats = torch.zeros(len(edges) - 1, dtype=torch.float64, device=device)
        self.counts = self.nats.clone()
        self.outputs = OutputCheck(device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add the losses of targets (B, length), from logits (B, length, V)."""
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        ).view_as(targets)
        self.outputs.add(losses)
        known = (targets != IGNORED).sum(0, dtype=torch.float64)
        self.nats.index_add_(0, self.bins, losses.sum(0, dtype=torch.float64))
        self.counts.index_add_(0, self.bins, known)

    def result(self, accelerator: Accelerator, view: Any, text_bytes: int) -> dict[str, Any]:
        """Return metrics of all processes, the same in every one.

        Args:
            accelerator: Of this process.
            view: For the message if outputs are not finite.
            text_bytes: Bytes of the text of all targets.
        """
        *sums, wrong = sum_over_processes(accelerator, *self.nats, *self.counts, self.outputs.wrong)
        self.outputs.require_none(wrong, view)
        nats, counts = sums[: len(self.nats)], sums[len(self.nats) :]
        return {
            "bits_per_byte": sum(nats) / math.log(2) / text_bytes,
            "perplexity": math.exp(sum(nats) / sum(counts)),
            "bits_by_position": [
                round(each / math.log(2) / count, DIGITS) if count else None
                for each, count in zip(nats, counts, strict=True)
            ],
        }


def position_edges(length: int) -> list[int]:
    """Return the edges of the bins of positions in a context: about four to each power of two."""
    powers = range(math.ceil(PER_OCTAVE * math.log2(length)) + 1)
    inside = {math.floor(2 ** (power / PER_OCTAVE)) for power in powers}
    return [0, *sorted(edge for edge in inside if edge < length), length]


def windows(stretches: Tensor, length: int) -> Tensor:
    """Divide stretches (B, T) into windows (B * T / length, length), filled up with IGNORED."""
    missing = -stretches.shape[1] % length
    filled = nn.functional.pad(stretches, (0, missing), value=IGNORED)
    return filled.reshape(-1, length)
