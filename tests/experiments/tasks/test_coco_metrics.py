"""COCO's metrics, of detections whose quality is known."""

from __future__ import annotations

import numpy as np
import pytest
from support.coco import TREE, write_coco

from comrope.experiments.data.coco import Coco
from comrope.experiments.tasks.coco_metrics import METRICS, metrics

mask = pytest.importorskip("pycocotools.mask")
THING = {"id": 0, "image_id": 1, "category_id": 1, "bbox": [5, 5, 20, 20], "area": 400,
         "iscrowd": 0}  # fmt: skip


def truth_of(*annotations, size: int = 50) -> dict:
    images = sorted({a["image_id"] for a in annotations})
    return {
        "images": [{"id": n, "width": size, "height": size} for n in images],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [*annotations],
    }


def found_at(left: float, top: float = 5, score: float = 0.9, image: int = 1) -> dict:
    return {"image_id": image, "category_id": 1, "bbox": [left, top, 20, 20], "score": score}


def test_an_object_whose_number_is_zero_can_be_found():
    found = metrics(truth_of(THING), [found_at(5)])
    assert tuple(found) == METRICS
    assert [found[name] for name in ("AP", "AP50", "AP75", "APs")] == [pytest.approx(100)] * 4
    assert found["APm"] is found["APl"] is None  # there is none of that size


def test_a_box_beside_the_object_counts_by_its_overlap():
    """By 4 of 20 pixels: 16 / 24 of the union, so it counts at overlaps of 0.5 to 0.65."""
    found = metrics(truth_of(THING), [found_at(9)])
    assert found["AP50"] == pytest.approx(100)
    assert found["AP75"] == 0
    assert found["AP"] == pytest.approx(40)


def test_a_wrong_box_with_a_higher_score_halves_the_precision():
    found = metrics(truth_of(THING), [found_at(5), found_at(28, 28, score=0.95)])
    assert found["AP50"] == pytest.approx(50)
    assert metrics(truth_of(THING), [found_at(5), found_at(28, 28, 0.5)])["AP50"] == pytest.approx(
        100
    )


def test_nothing_found_is_a_result():
    assert metrics(truth_of(THING), [])["AP"] == 0


def test_the_area_of_a_mask_is_that_of_the_mask():
    """Two thin rings of 60 x 60 pixels: small by their masks, medium by their boxes."""
    ring = np.zeros((100, 100), np.uint8, order="F")
    ring[10:70, 10:70] = 1
    ring[12:68, 12:68] = 0

    def coded(pixels) -> dict:
        runs = mask.encode(np.asfortranarray(pixels))
        return {**runs, "counts": runs["counts"].decode()}

    assert int(ring.sum()) < 32**2 < 60**2
    shared = {"category_id": 1, "bbox": [10, 10, 60, 60], "segmentation": coded(ring)}
    area = {"area": int(ring.sum()), "iscrowd": 0}
    truth = truth_of(*({**shared, **area, "id": n, "image_id": n} for n in (1, 2)), size=100)
    # One is found. In the other's image something else is, of that area too: if it counted as
    # medium, it would be no error among the small ones.
    elsewhere = coded(np.roll(ring, 25, axis=(0, 1)))
    found = [
        {**shared, "image_id": 1, "score": 0.9},
        {**shared, "image_id": 2, "score": 0.95, "segmentation": elsewhere},
    ]
    small = metrics(truth, found, "segm")
    assert small["APm"] is None
    assert small["APs"] == pytest.approx(small["AP"])
    assert 10 < small["APs"] < 60


def test_the_checked_annotations_give_the_same_metrics_as_the_file(tmp_path):
    """With polygons, run lengths, a crowd, a polygon without area, and a box outside."""
    rng, runs = np.random.default_rng(0), np.zeros((80, 100), np.uint8, order="F")
    runs[20:60, 30:70] = 1
    outlines = [
        [[10, 10, 40, 12, 35, 50, 8, 45]],
        [[60, 5, 90, 5, 75, 40], [50, 50, 70, 50, 70, 70]],
        {"size": [80, 100], "counts": mask.encode(runs)["counts"].decode()},
        {"size": [80, 100], "counts": [3200, 40, 40, 40, 40, 40, 4600]},
        [[110, 10, 130, 10, 130, 40]],
    ]
    boxes = [[8, 10, 32, 40], [50, 5, 40, 65], [30, 20, 40, 40], [40, 0, 3, 80], [110, 10, 20, 30]]
    annotations = [
        {"id": n, "image_id": image, "category_id": 90 if n % 2 else 2, "bbox": box,
         "area": 0.8 * box[2] * box[3], "iscrowd": int(outline is outlines[3]),
         "segmentation": outline, "ignore": 0, "attributes": {"occluded": False}}
        for n, (image, box, outline) in enumerate(
            (image, box, outline)
            for image in (7, 3) for box, outline in zip(boxes, outlines, strict=True)
        )
    ]  # fmt: skip
    images = [{**image, "width": 100, "height": 80} for image in TREE["images"]]
    tree = {**TREE, "images": images, "annotations": annotations, "info": {}, "licenses": []}
    checked = Coco(write_coco(tmp_path, tree), "train", outlines=True).truth
    found = []
    for annotation in annotations:
        if annotation["id"] == 6:
            continue
        moved = np.add(annotation["bbox"], rng.integers(-4, 5, 4)).tolist()
        pixels = np.zeros((80, 100), np.uint8, order="F")
        left, top, width, height = moved
        pixels[top : top + height, left : left + width] = 1
        own = {name: annotation[name] for name in ("image_id", "category_id")}
        coded = mask.encode(pixels)
        found.append({**own, "bbox": moved, "score": float(rng.random()), "segmentation": coded})
    for kind in ("bbox", "segm"):
        expected = metrics(tree, found, kind)
        assert metrics(checked, found, kind) == expected
        assert 0 < expected["AP"] < 100
