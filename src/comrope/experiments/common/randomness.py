"""Randomness without state: every draw is seeded by its purpose.

The augmentation of a sample is a function of (seed, epoch, place in the epoch), the perturbation of
a step one of (seed, step). Neither depends on the number of processes. Draws of a process within a
step (drop path, mixup, erasing) depend on (seed, step, part, process). So a resumed run has the
same draws as one without interruption, and no generator state is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["derive", "generator", "seed_everything", "seeded"]


def derive(*parts: int | str) -> int:
    """Return a seed of 63 bits from the purpose of a draw."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator, seeded by the purpose of its draws."""
    return torch.Generator(device=device).manual_seed(derive(*parts))


def seed_everything(*parts: int | str) -> None:
    """Seed the global generators of Python, NumPy and torch (all devices)."""
    seed = derive(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (timm's augmentations draw from it)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(*parts: int | str, numpy: bool = True) -> Iterator[None]:
    """Seed the global generators of the CPU inside the block, and restore them after it.

    Args:
        parts: The purpose of the draws.
        numpy: Seed NumPy too. Most of this function's time is for saving NumPy's state.
    """
    states = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state() if numpy else None  # noqa: NPY002
    seed = derive(*parts)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy:
        np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy_state is not None:
            np.random.set_state(numpy_state)  # noqa: NPY002
