"""Decoded pixels in memory that is shared by all loading processes."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from typing import Any, BinaryIO

import numpy as np

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.memory import available_memory

__all__ = ["SIDE_BY_SIDE", "PixelCache"]

SAMPLE = 32  # items from which the memory of all items is estimated
SIDE_BY_SIDE = "COMROPE_SIDE_BY_SIDE"  # environment variable: runs that share this machine's memory
MAX_SHARE = 0.8  # of the available memory: training needs the rest


class PixelCache:
    """The pictures of many items, decoded once: one per image, several per video.

    They are stored in a file without a name. A loading process gets the file, not its content.
    (torch's shared memory is in /dev/shm, which is small in containers.)

    Args:
        count: Number of items.
        decode: Function from the index of an item to a number, such as its class, and its
            pictures, (H, W) or (H, W, C), uint8. An error is stored too, and raised by ``load``.
        items: Name of the items in messages, such as "images".
    """

    def __init__(
        self, count: int, decode: Callable[[int], tuple[int, Sequence[Any]]], items: str
    ) -> None:
        self.count, self.size = count, 0
        self.errors: dict[int, str] = {}
        self._keep(_memory_file())
        index_of_items = np.zeros((count, 3), np.int64)  # number, first picture, pictures
        places = array("q")  # of a picture: first byte and sizes, 0 where it has no third

        def attempt(index: int) -> tuple[int, list[Any]] | str:
            try:
                number, pictures = decode(index)
                return number, [np.asarray(picture) for picture in pictures]
            except Exception as error:
                return str(error)

        def add(indices: Sequence[int]) -> None:
            for index, found in zip(indices, pool.map(attempt, indices), strict=True):
                if isinstance(found, str):
                    self.errors[index] = found
                    continue
                number, pictures = found
                index_of_items[index] = number, len(places) // 4, len(pictures)
                for pixels in pictures:
                    places.extend((self.size, *pixels.shape, *(0,) * (3 - pixels.ndim)))
                    self.size += self.file.write(np.ascontiguousarray(pixels).data)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            few = range(0, count, max(1, count // SAMPLE))
            add(few)
            _check_memory(self.size / max(1, len(few) - len(self.errors)), count, items)
            add([index for index in range(count) if index not in few])
        self.file.write(bytes(-self.size % 8) + index_of_items.tobytes() + places.tobytes())
        self.file.flush()
        self._map()

    def load(self, index: int) -> tuple[int, int]:
        """Return the number that is stored with an item, and the number of its pictures.

        Raises:
            ValueError: The item could not be decoded.
        """
        if index in self.errors:
            raise ValueError(self.errors[index])
        number, _, pictures = self.items[index].tolist()
        return number, pictures

    def picture(self, index: int, number: int = 0) -> np.ndarray:
        """Return a picture of an item, (H, W) or (H, W, C), uint8."""
        first, *sizes = self.places[self.items[index, 1] + number].tolist()
        shape = [size for size in sizes if size]
        return self.memory[first : first + math.prod(shape)].reshape(shape)

    def _keep(self, file: BinaryIO) -> None:
        self.file = file
        weakref.finalize(self, file.close)

    def _map(self) -> None:
        mapped = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.memory = np.frombuffer(mapped, np.uint8)
        tables = self.memory[self.size + -self.size % 8 :].view(np.int64)
        self.items = tables[: 3 * self.count].reshape(-1, 3)
        self.places = tables[3 * self.count :].reshape(-1, 4)

    def __getstate__(self) -> dict[str, Any]:
        plain = {"count": self.count, "size": self.size, "errors": self.errors}
        return {**plain, "file": reduction.DupFd(self.file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.count, self.size, self.errors = state["count"], state["size"], state["errors"]
        self._keep(os.fdopen(state["file"].detach(), "rb"))
        self._map()


def _memory_file() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("comrope"), "wb")
    return tempfile.TemporaryFile()


def _check_memory(each: float, count: int, items: str) -> None:
    """Raise unless all items fit into memory, at the mean size of the measured ones."""
    # Every process of a run keeps all items, and several runs may share the machine (launch.py).
    names = ("LOCAL_WORLD_SIZE", SIDE_BY_SIDE)
    processes = math.prod(int(os.environ.get(name, "1")) for name in names)
    needed, available = each * count * processes, available_memory()
    if needed > MAX_SHARE * available:
        raise UserError(
            f"data.cache: {count} {items} would need about {needed / 2**30:.1f} GiB of memory, "
            f"expected at most {MAX_SHARE:.0%} of the available {available / 2**30:.1f} GiB; "
            "data.cache=false decodes them on demand"
        )
