"""Outlines: packed as pycocotools packs them, and refused where it would read beyond memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from support.coco import SQUARE

from comrope.experiments.data.outlines import LARGEST, pack

mask = pytest.importorskip("pycocotools.mask")
masks = arrays(
    np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=40), elements=st.integers(0, 1)
)
found_by = settings(deadline=None, derandomize=True, max_examples=200)


def runs_of(pixels) -> list[int]:
    """Run lengths of a mask (H, W), column by column, the first of zeros."""
    flat = pixels.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=0))
    return np.diff(changes, prepend=0, append=flat.size).tolist()


def decoded(outline, height: int, width: int) -> np.ndarray:
    return mask.decode({"size": [height, width], "counts": outline.runs})


@found_by
@given(masks)
def test_run_lengths_are_those_of_pycocotools(pixels):
    size = [*pixels.shape]
    expected = mask.encode(np.asfortranarray(pixels))["counts"]
    for counts in (runs_of(pixels), expected.decode()):
        outline = pack({"size": size, "counts": counts}, *size)
        assert outline == (expected, pixels.sum())
        assert np.array_equal(decoded(outline, *size), pixels)


@found_by
@given(masks, st.data())
def test_runs_of_no_pixel_are_removed(pixels, data):
    """They are valid, but pycocotools' overlaps with them are wrong."""
    size, runs = [*pixels.shape], runs_of(pixels)
    place = data.draw(st.integers(0, len(runs) - 1))
    first = data.draw(st.integers(0, runs[place]))
    split = [*runs[:place], first, 0, runs[place] - first, *runs[place + 1 :], 0, 0]
    assert (
        pack({"size": size, "counts": split}, *size).runs
        == mask.encode(np.asfortranarray(pixels))["counts"]
    )


@found_by
@given(st.text(st.characters(min_codepoint=48, max_codepoint=111), max_size=12), st.booleans())
def test_any_text_is_a_whole_mask_or_refused(text, one_more):
    for size in ([4, 5], [1, 1], [1, 16]):
        for counts in (text, text + "`" * one_more):
            try:
                outline = pack({"size": size, "counts": counts}, *size)
            except ValueError:
                continue
            assert decoded(outline, *size).sum() == outline.area
            assert pack({"size": size, "counts": outline.runs.decode()}, *size) == outline


@found_by
@given(
    st.lists(st.lists(st.floats(-20, 60), min_size=6, max_size=12).map(lambda p: p[len(p) % 2 :]),
             min_size=1, max_size=3)
)  # fmt: skip
def test_polygons_are_those_of_pycocotools(polygons):
    polygons = [[min(v, 40 if n % 2 else 60) for n, v in enumerate(p)] for p in polygons]
    outline = pack(polygons, 20, 30)
    wide = [p for p in polygons if len(p) >= 6]
    if wide:
        assert outline.runs == mask.merge(mask.frPyObjects(wide, 20, 30))["counts"]
    assert outline.area == decoded(outline, 20, 30).sum()


@pytest.mark.parametrize(
    ("outline", "area"),
    [
        (SQUARE, 600),
        ([*SQUARE, [50, 50, 60, 50, 60, 60, 50, 60]], 700),
        ([[1, 1, 9, 9], *SQUARE], 600),  # the first has no area
        ([[128, 128.5], *SQUARE], 600),  # a point, as COCO Annotator writes it
        ([[-20, -5, 30, -5, 30, 40, -20, 40]], 30 * 40),  # partly outside
        ([[-100, -80, 200, -80, 200, 160, -100, 160]], 8000),  # as far outside as is accepted
        ([[110, 10, 130, 10, 130, 40]], 0),
        ([[1, 1, 9, 9]], 0),
        ({"size": [80, 100], "counts": [8000]}, 0),
        ({"size": [80, 100], "counts": [0, 8000]}, 8000),
    ],
)
def test_areas(outline, area):
    assert pack(outline, 80, 100).area == area


NAN, INF = float("nan"), float("inf")


def point(*values, x=(5, 25, 25, 5)):
    """A polygon with other numbers in place of its second point."""
    return [[x[0], 5, *values, x[2], 25, x[3], 25]]


# What an annotation has in place of an outline, and what the message names.
WRONG = {
    "none": (None, "None"),
    "no polygons": ([], r"\[\]"),
    "a text": ("abc", "abc"),
    "a flat polygon": (SQUARE[0], "10"),
    "points as pairs": ([[[10, 10], [30, 10], [30, 40]]], "lists of numbers"),
    "an empty polygon": ([[]], "0 numbers"),
    "an odd number": ([[1, 1, 9, 9, 3, 5, 7]], "7 numbers"),
    "numbers as text": ([["1", "1", "9", "1", "9", "9"]], "lists of numbers"),
    "flags": (point(True, 5), "lists of numbers"),
    "null": (point(None, 5), "lists of numbers"),
    "NaN": (point(NAN, 5), "nan"),
    "NaN at first": ([[NAN, 5, 25, 5, 25, 25]], "nan"),
    "NaN in y": (point(25, NAN), "nan"),
    "all NaN": ([[NAN] * 8], "nan"),
    "NaN beside a good polygon": ([*SQUARE, *point(NAN, 5)], "nan"),
    "NaN in a point": ([*SQUARE, [NAN, 1]], "nan"),
    "infinite": (point(INF, 5), "inf"),
    "far to the left": (point(-1e9, 5), "-1000000000"),
    "far below": (point(25, 1e9), "1000000000"),
    "a third size outside": (point(201, 5), "201"),
    "1e30": (point(1e30, 5), "1e[+]30"),
    "400 digits": (point(10**400, 5), "1000"),
    "a long boundary": ([[0, 0, 100, 80] * 4000], "boundary"),
    "another size": ({"size": [100, 80], "counts": [8000]}, r"\[80, 100\].*\[100, 80\]"),
    "no size": ({"counts": [8000]}, "None"),
    "a size as text": ({"size": "80x100", "counts": [8000]}, "80x100"),
    "no counts": ({"size": [80, 100]}, "None"),
    "no runs": ({"size": [80, 100], "counts": []}, "8000, got 0"),
    "too few pixels": ({"size": [80, 100], "counts": [1]}, "8000, got 1"),
    "too many pixels": ({"size": [80, 100], "counts": [1, 8000]}, "got 8001"),
    "below zero": ({"size": [80, 100], "counts": [9000, -1000]}, "from 0"),
    "half a pixel": ({"size": [80, 100], "counts": [7999.5, 0.5]}, "integers"),
    "runs as text": ({"size": [80, 100], "counts": ["8000"]}, "integers"),
    "runs as flags": ({"size": [80, 100], "counts": [True, 7999]}, "integers"),
    "nested runs": ({"size": [80, 100], "counts": [[8000]]}, "integers"),
    "a run of 400 digits": ({"size": [80, 100], "counts": [10**400]}, "1000"),
    "runs of 2^64 that overflow": ({"size": [80, 100], "counts": [2**63, 2**63, 8000]}, "from"),
    "an empty text": ({"size": [80, 100], "counts": ""}, "''"),
    "other characters": ({"size": [80, 100], "counts": "ab c"}, "ab c"),
    "a zero byte": ({"size": [80, 100], "counts": "ab\x00c"}, "x00"),
    "accents": ({"size": [80, 100], "counts": "é"}, "é"),
    "half a character": ({"size": [80, 100], "counts": "\ud800"}, "ud800"),
    "a text that does not end": ({"size": [80, 100], "counts": "P"}, "end"),
    "seven digits": ({"size": [80, 100], "counts": "PPPPPP0"}, "end"),
    "a text below zero": ({"size": [80, 100], "counts": "O"}, "at least 0"),
    "a text of too few pixels": ({"size": [80, 100], "counts": "123"}, "got 6"),
    "bytes": ({"size": [80, 100], "counts": b"1"}, "as text"),
}


@pytest.mark.parametrize("how", WRONG)
def test_others_are_refused(how):
    outline, named = WRONG[how]
    with pytest.raises(ValueError, match=named) as raised:
        pack(outline, 80, 100)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_images_that_are_too_large_for_pycocotools_are_refused():
    with pytest.raises(ValueError, match=str(LARGEST)):
        pack(SQUARE, 2**13, 2**13)
