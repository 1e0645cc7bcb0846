"""COCO's metrics of detections, by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["METRICS", "metrics"]

# The first six of pycocotools' twelve numbers, in its order.
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def metrics(
    truth: Mapping[str, Any], found: Iterable[Mapping[str, Any]], kind: str = "bbox"
) -> dict[str, float | None]:
    """Return COCO's metrics by name, in percent; None where there is nothing to find.

    Args:
        truth: The annotations, in the format of COCO's files.
        found: Detections: ``image_id``, ``category_id``, ``score`` and ``bbox`` (left, top, width,
            height), and with ``kind="segm"`` a ``segmentation``.
        kind: "bbox" or "segm".
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    # The area of a mask is its own: pycocotools would take the box's, if there is one.
    results = [{k: v for k, v in one.items() if kind == "bbox" or k != "bbox"} for one in found]
    # An id of 0 would never be found: pycocotools writes it for "nothing".
    numbered = [{**a, "id": number} for number, a in enumerate(truth["annotations"], start=1)]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        reference = COCO()
        reference.dataset = {**truth, "annotations": numbered, "info": {}}
        reference.createIndex()
        # It does not take an empty list, but that nothing was found is a result.
        detected = reference.loadRes(results) if results else COCO()
        if not results:
            detected.dataset = {**reference.dataset, "annotations": []}
            detected.createIndex()
        judge = COCOeval(reference, detected, kind)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {
        name: None if value < 0 else 100 * float(value)
        for name, value in zip(METRICS, judge.stats, strict=False)
    }
