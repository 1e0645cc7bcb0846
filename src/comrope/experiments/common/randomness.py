"""Randomness without state: every draw is seeded by what it is for.

A sample's augmentation is a function of (seed, epoch, place in the epoch), a step's perturbation of
the coordinates of (seed, step): neither depends on the number of processes. What each process draws
inside a step (drop path, mixup, erasing) depends on (seed, step, part, process). So a run that was
killed draws what it would have drawn, and no generator state has to be saved.
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
    """Return a seed of 63 bits from what the draw is for."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator, seeded by what the draw is for."""
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
        parts: What the draws are for.
        numpy: Seed NumPy's as well. Saving its state is most of the cost of this function.
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
