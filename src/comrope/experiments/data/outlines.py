"""Outlines of objects in COCO's format, checked before pycocotools reads them.

pycocotools checks nothing: run lengths that do not add up are masks of uninitialised memory, and a
point that is far away takes gigabytes.
"""

from __future__ import annotations

import math
from operator import sub
from reprlib import repr as shortened
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Outline", "pack"]

# Points may be outside of an image by its width or height. Tools that do not clip, such as
# X-AnyLabeling, write points of cut-off objects there. Points farther away are errors: for an image
# of 1280 x 720 pixels, Label Studio has exported points at (3977, 3031).
BEYOND = 1
LONGEST = 2**20  # pixels of a polygon's boundary; pycocotools takes 120 bytes for each
# Pixels of an image. pycocotools reserves six bytes for a run length and none for the end of the
# text. In larger images, all run lengths of a mask can need six, and it would write beyond that.
LARGEST = 3 * 2**24
FIRST, BITS, MORE, SIGN = 48, 5, 32, 16  # compressed run lengths: like LEB128, in printable text
MOST_DIGITS = 6  # of a run length of at most 2^29


class Outline(NamedTuple):
    """The outline of an object."""

    runs: bytes  # COCO's compressed run lengths
    area: int  # in pixels


def pack(outline: Any, height: int, width: int) -> Outline:
    """Return a checked outline as compressed run lengths.

    Args:
        outline: The entry "segmentation" of an annotation: polygons, or run lengths, which may be
            compressed. Polygons of less than three points have no area and are ignored.
        height, width: Size of the image, in pixels.

    Raises:
        ValueError: It is not such an outline, or it is too large for pycocotools.
    """
    from pycocotools import mask

    if height * width > LARGEST:
        raise ValueError(f"expected an image of at most {LARGEST} pixels, got {height * width}")
    if isinstance(outline, dict):
        counts = _counts(outline, height, width)
    elif isinstance(outline, list) and outline:
        polygons = [part for part in outline if _has_area(part, height, width)]
        if polygons:
            runs = mask.merge(mask.frPyObjects(polygons, height, width))
            return Outline(runs["counts"], int(mask.area(runs)))
        counts = np.array([height * width])
    else:
        raise ValueError(f"expected polygons or run lengths, got {shortened(outline)}")
    runs = mask.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    return Outline(runs["counts"], int(counts[1::2].sum()))


def _has_area(polygon: Any, height: int, width: int) -> bool:
    """Return whether a polygon has three points or more; raise if it is none, or too large."""
    if not isinstance(polygon, list) or not set(map(type, polygon)) <= {int, float}:
        raise ValueError(f"expected polygons as lists of numbers, got {shortened(polygon)}")
    if not polygon or len(polygon) % 2:
        raise ValueError(f"expected x and y of every point, got {len(polygon)} numbers")
    length = 0.0
    for name, values, side in (("x", polygon[::2], width), ("y", polygon[1::2], height)):
        least, most = -BEYOND * side, (1 + BEYOND) * side
        for value in (min(values), max(values)):
            if not least <= value <= most:
                raise ValueError(f"expected {name} from {least} to {most}, got {shortened(value)}")
        if not math.isfinite(sum(values)):  # not a number, and not the smallest or largest
            raise ValueError(f"expected a finite {name}, got nan")
        length += sum(map(abs, map(sub, values, [*values[1:], values[0]])))
    if length > LONGEST:
        raise ValueError(f"expected a boundary of at most {LONGEST} pixels, got {length:.0f}")
    return len(polygon) >= 6


def _counts(outline: dict[str, Any], height: int, width: int) -> np.ndarray:
    """Return run lengths, (n,): without zeros, except of the first, and with the sum of pixels."""
    size, counts = outline.get("size"), outline.get("counts")
    if size != [height, width]:
        raise ValueError(f"expected run lengths of size {[height, width]}, got {shortened(size)}")
    if isinstance(counts, str):
        found = _decoded(counts)
    elif isinstance(counts, list) and set(map(type, counts)) <= {int}:
        if counts and not 0 <= min(counts) <= max(counts) <= LARGEST:
            raise ValueError(f"expected run lengths from 0 to {LARGEST}, got {shortened(counts)}")
        found = np.array(counts, np.int64)
    else:
        raise ValueError(f"expected run lengths as integers or as text, got {shortened(counts)}")
    if len(found) and found.min() < 0:
        raise ValueError(f"expected run lengths of at least 0, got {found.min()}")
    if (total := int(found.sum())) != height * width:
        raise ValueError(f"expected run lengths with the sum {height * width}, got {total}")
    if (found[1:] == 0).any():  # pycocotools compares such masks incorrectly
        starts, times = np.unique(found.cumsum()[:-1], return_counts=True)
        starts = starts[(times % 2 == 1) & (starts < total)]
        found = np.diff(starts, prepend=0, append=total)
    return found


def _decoded(text: str) -> np.ndarray:
    """Return run lengths from COCO's compressed text, (n,).

    A run length has one to six digits of five bits, the lowest first, and a sign. From the fourth
    on, it is the difference from the run length two places before.
    """
    codes = text.encode("ascii") if text.isascii() else b""
    digits = np.frombuffer(codes, np.uint8).astype(np.int64) - FIRST
    if not len(digits) or digits.min() < 0 or digits.max() >= 2 * MORE:
        raise ValueError(f"expected compressed run lengths, got {shortened(text)}")
    (ends,) = np.nonzero(digits & MORE == 0)
    starts = np.concatenate(([0], ends + 1))[: len(ends)]
    lengths = ends - starts + 1
    if not len(ends) or ends[-1] != len(digits) - 1 or lengths.max() > MOST_DIGITS:
        raise ValueError(f"expected compressed run lengths that end, got {shortened(text)}")
    places = np.arange(len(digits)) - np.repeat(starts, lengths)
    found = np.add.reduceat((digits & (MORE - 1)) << (BITS * places), starts)
    found -= (digits[ends] & SIGN != 0).astype(np.int64) << (BITS * lengths)
    for chain in (found[1::2], found[2::2]):
        np.cumsum(chain, out=chain)
    return found
