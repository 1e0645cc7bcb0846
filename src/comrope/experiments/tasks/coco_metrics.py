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
    """Return COCO's metrics by name, in percent; None for metrics without annotated objects.

    Args:
        truth: The annotations, in the format of COCO's files.
        found: Detections: ``image_id``, ``category_id``, ``score`` and ``bbox`` (left, top, width,
            height); with ``kind="segm"`` also ``segmentation``.
        kind: "bbox" or "segm".
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    # Without "bbox", because pycocotools would use the area of the box for a mask.
    results = [{k: v for k, v in one.items() if kind == "bbox" or k != "bbox"} for one in found]
    # Ids start at 1, because 0 means "no match" in pycocotools.
    numbered = [{**a, "id": number} for number, a in enumerate(truth["annotations"], start=1)]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        reference = COCO()
        reference.dataset = {**truth, "annotations": numbered, "info": {}}
        reference.createIndex()
        # pycocotools refuses an empty list, but no detections are a valid result.
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
