"""Memory of this machine: checks before a run begins, and errors of allocators as user errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from comrope.experiments.common.errors import UserError

__all__ = ["available_memory", "require_memory", "shortage_reported", "total_memory"]


def available_memory() -> int:
    """Return the available bytes, in a container at most its limit."""
    import psutil

    return _limited(int(psutil.virtual_memory().available))


def total_memory(device: str = "cpu") -> int:
    """Return the bytes of this machine, in a container at most its limit, or of its GPU.

    Args:
        device: "cpu", or "auto" for a GPU if there is one.
    """
    import psutil

    if device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return _limited(int(psutil.virtual_memory().total))


def require_memory(needed: int, where: str, what: str, device: str = "cpu") -> None:
    """Raise unless a machine has some memory at all; other programs are not considered.

    Args:
        needed: The smallest number of bytes that may suffice.
        where: The field that decides it, for the message.
        what: What needs the memory.
        device: As in ``total_memory``.
    """
    if needed > (total := total_memory(device)):
        raise UserError(
            f"{where}: {what} would need at least {needed / 2**30:.1f} GiB of memory, expected at "
            f"most {total / 2**30:.1f} GiB, the memory of this machine"
        )


@contextlib.contextmanager
def shortage_reported(todo: str) -> Iterator[None]:
    """Replace the errors of allocators within the block by a user error that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(f"not enough memory ({reason}); {todo}") from error


def _limited(size: int) -> int:
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            size = min(size, int(Path("/sys/fs/cgroup", limit).read_text(encoding="utf-8")))
    return size
