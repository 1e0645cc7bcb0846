"""Randomness without state: every draw is seeded by what it is for.

A sample's augmentation is a function of (seed, epoch, place in the epoch), a step's noise on the
coordinates of (seed, step): neither depends on the number of processes. What is drawn inside a step
for each process, drop path, mixup and erasing, depends on (seed, step, part, process) besides. So a
run that was killed draws what it would have drawn, and there are no generator states to save.
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
    """A seed of 63 bits from what the draw is for."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device=device).manual_seed(derive(*parts))


def seed_everything(*parts: int | str) -> None:
    """The global generators of Python, NumPy and torch (all devices)."""
    seed = derive(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (what timm's augmentations draw from)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(*parts: int | str, numpy: bool = True) -> Iterator[None]:
    """The same for a while, on the CPU; then everything is as it was. Saving NumPy's state is most
    of what that costs: whoever does not draw from it may leave it out."""
    states = random.getstate(), torch.get_rng_state()
    theirs = np.random.get_state() if numpy else None  # noqa: NPY002
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
        if theirs is not None:
            np.random.set_state(theirs)  # noqa: NPY002
