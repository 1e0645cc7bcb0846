"""COCO's format, whole and broken, and its metrics on a case that can be done by hand."""

from __future__ import annotations

import copy
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.coco import METRICS, Coco, metrics

TREE = {
    "images": [
        {"id": 7, "file_name": "a.png", "width": 100, "height": 80},
        {"id": 3, "file_name": "b.png", "width": 60, "height": 60},
    ],
    "categories": [{"id": 90, "name": "cup"}, {"id": 2, "name": "car"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 90, "bbox": [10, 10, 20, 30]},
        {"id": 2, "image_id": 7, "category_id": 2, "bbox": [90, 70, 40, 40]},
        {"id": 3, "image_id": 7, "category_id": 2, "bbox": [5, 5, 0, 9]},
        {"id": 4, "image_id": 7, "category_id": 2, "bbox": [200, 5, 9, 9]},
        {"id": 5, "image_id": 7, "category_id": 2, "bbox": [0, 0, 9, 9], "iscrowd": 1},
    ],
}


@pytest.fixture
def write(tmp_path):
    def written(tree):
        (tmp_path / "annotations").mkdir(exist_ok=True)
        text = tree if isinstance(tree, str) else json.dumps(tree)
        (tmp_path / "annotations" / "instances_train.json").write_text(text)
        (tmp_path / "train").mkdir(exist_ok=True)
        for name, size in (("a.png", (100, 80)), ("b.png", (60, 60))):
            Image.new("L", size).save(tmp_path / "train" / name)
        return tmp_path

    return written


def test_boxes_are_cut_off_and_what_is_left_of_nothing_is_left_out(write):
    data = Coco(write(TREE), "train")
    image, target = data.load(0)
    assert (image.mode, image.size, target.image_id) == ("RGB", (100, 80), 7)
    assert target.boxes.tolist() == [[10, 10, 30, 40], [90, 70, 100, 80]]
    assert target.labels.tolist() == [2, 1]  # in the order of their ids, holes and all
    assert data.classes == ["car", "cup"]
    assert data.category_ids == [2, 90]
    assert data.left_out == 3
    empty = data.load(1)[1]
    assert empty.boxes.shape == (0, 4)
    assert empty.labels.shape == (0,)


def test_files_that_are_lost_or_of_another_size(write):
    root = write(TREE)
    data = Coco(root, "train")
    Image.new("RGB", (61, 60)).save(root / "train" / "b.png")
    with pytest.raises(ValueError, match="expected 60 x 60, as annotated, got 61 x 60"):
        data.load(1)
    (root / "train" / "a.png").unlink()
    with pytest.raises(FileNotFoundError):
        data.load(0)
    assert data.name(0).endswith("a.png")


def changed(**places):
    tree = copy.deepcopy(TREE)
    for place, value in places.items():
        part, number, key = place.split("__")
        tree[part][int(number)][key] = value
    return tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "expected a list of images"),
        ({**TREE, "categories": []}, "expected images and categories"),
        (changed(annotations__0__image_id=8), "annotation 1: no image 8"),
        (changed(annotations__0__category_id=1), "annotation 1: no category 1"),
        (changed(annotations__1__id=1), r"an id of its own, 0 to 2\^63, got 1"),
        (changed(annotations__0__bbox=[1, 2, 3]), "a bbox of four numbers"),
        (changed(annotations__0__bbox=[1, 2, 3, None]), "a bbox of four numbers"),
        (changed(images__0__file_name="../../x"), "a file of the data set"),
        ({**TREE, "images": [{"id": 1}]}, r"images\[0\] has no file_name"),
    ],
)
def test_what_makes_no_sense_is_named(tree, message, write):
    with pytest.raises(UserError, match=message):
        Coco(write(tree), "train")


def test_places(write):
    root = write(TREE)
    with pytest.raises(UserError, match=r"no instances_val.json; found instances_train.json"):
        Coco(root, "val")
    (root / "train").rename(root / "train2017")
    (root / "annotations/instances_train.json").rename(
        root / "annotations/instances_train2017.json"
    )
    assert len(Coco(root, "train")) == 2


def test_metrics_of_a_case_by_hand(write):
    """One box of two is found, at IoU 0.6, behind a false one that scores higher.

    At thresholds 0.5, 0.55 and 0.6 precision is 1/2 up to recall 1/2, so AP is 51/101 of 1/2; at
    the seven others it is 0.
    """
    tree = copy.deepcopy(TREE)
    tree["categories"] = tree["categories"][:1]
    tree["annotations"] = [
        {"id": 1, "image_id": 7, "category_id": 90, "bbox": [0, 0, 40, 40], "area": 1600,
         "iscrowd": 0},
        {"id": 2, "image_id": 3, "category_id": 90, "bbox": [0, 0, 50, 50], "area": 2500,
         "iscrowd": 0},
    ]  # fmt: skip
    data = Coco(write(tree), "train")
    found = [
        {"image_id": 7, "category_id": 90, "bbox": [0, 0, 40, 24.5], "score": 0.8},
        {"image_id": 7, "category_id": 90, "bbox": [60, 50, 20, 20], "score": 0.9},
    ]
    result = metrics(data.truth, found)
    half = 100 * 51 / 101 / 2
    assert tuple(result) == METRICS
    assert result["AP50"] == pytest.approx(half)
    assert result["AP75"] == 0
    assert result["AP"] == pytest.approx(0.3 * half)
    assert result["APm"] == pytest.approx(0.3 * 2 * half)  # the false one is small
    assert result["APs"] is None  # nothing small was to be found
    perfect = [
        {"image_id": a["image_id"], "category_id": 90, "bbox": a["bbox"], "score": 1.0}
        for a in tree["annotations"]
    ]
    assert metrics(data.truth, perfect)["AP"] == pytest.approx(100)
    assert metrics(data.truth, [])["AP"] == 0


def test_an_annotation_with_id_zero_can_be_found():
    truth = {
        "images": [{"id": 1, "width": 50, "height": 50}],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [
            {"id": 0, "image_id": 1, "category_id": 1, "bbox": [5, 5, 20, 20], "area": 400,
             "iscrowd": 0}
        ],
    }  # fmt: skip
    one = {"image_id": 1, "category_id": 1, "bbox": [5, 5, 20, 20], "score": 0.9}
    assert metrics(truth, [one])["AP"] == pytest.approx(100)


def test_the_area_of_a_mask_is_that_of_the_mask():
    """Two thin rings of 60 x 60 pixels: small by their masks, medium by their boxes."""
    ring = np.zeros((100, 100), np.uint8, order="F")
    ring[10:70, 10:70] = 1
    ring[12:68, 12:68] = 0
    coded = mask.encode(ring)
    outline = {"size": [100, 100], "counts": coded["counts"].decode()}
    box, area = [10, 10, 60, 60], int(ring.sum())
    assert area < 32**2 < 60**2
    shared = {"category_id": 1, "bbox": box, "segmentation": outline}
    truth = {
        "images": [{"id": n, "width": 100, "height": 100} for n in (1, 2)],
        "categories": [{"id": 1, "name": "ring"}],
        "annotations": [
            {**shared, "id": n, "image_id": n, "area": area, "iscrowd": 0} for n in (1, 2)
        ],
    }
    # One is found. The other's place is taken by one that is there and nowhere near: if it were
    # taken for a medium one, it would be nobody's fault among the small.
    elsewhere = np.roll(ring, 25, axis=(0, 1))
    wrong = {**mask.encode(np.asfortranarray(elsewhere))}
    wrong["counts"] = wrong["counts"].decode()
    found = [
        {**shared, "image_id": 1, "score": 0.9},
        {**shared, "image_id": 2, "score": 0.95, "segmentation": wrong},
    ]
    small = metrics(truth, found, "segm")
    assert small["APm"] is None
    assert small["APs"] == pytest.approx(small["AP"])
    assert 10 < small["APs"] < 60  # with the boxes' area the wrong one would be no small one


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("images", {"width": "90"}, "image 7: expected a width in pixels, got '90'"),
        ("images", {"height": None}, "image 7: expected a height in pixels, got None"),
        ("images", {"id": 2**70}, "images.0.: expected an id of its own, 0 to 2.63, got"),
        ("images", {"id": -1}, "images.0.: expected an id of its own, 0 to 2.63, got -1"),
    ],
)
def test_what_cannot_be_is_named(part, change, told, write):
    tree = copy.deepcopy(TREE)
    tree[part][0] |= change
    if "id" in change:
        tree["annotations"] = []
    with pytest.raises(UserError, match=told):
        Coco(write(tree), "train")


def test_an_area_that_is_none_is_that_of_the_box(write):
    tree = copy.deepcopy(TREE)
    tree["annotations"][0]["area"] = None
    assert Coco(write(tree), "train").truth["annotations"][0]["area"] == 20 * 30


@pytest.mark.parametrize(
    ("outline", "told"),
    [
        (None, "none"),
        ([[1, 1, 9, 9]], "less than three points"),
        ([[1, 1, 9, 9, 3, 5, 7]], "less than three points"),
        ({"size": [10, 10], "counts": [50, 50]}, r"of size \[10, 10\], the image is \[80, 100\]"),
        ({"size": [80, 100], "counts": "abc"}, "RLE"),
    ],
)
def test_outlines_that_are_none_are_named_before_training(outline, told, write):
    tree = copy.deepcopy(TREE)
    tree["annotations"] = [{**tree["annotations"][0], "segmentation": outline}]
    with pytest.raises(
        UserError, match=rf"annotation 1 has no segmentation .*{told}.*expected box"
    ):
        Coco(write(tree), "train", outlines=True)
    assert len(Coco(write(tree), "train").boxes) == 1


@pytest.mark.parametrize(
    ("name", "classes", "images", "boxes"), [("bccd", 3, (292, 72), (3941, 945))]
)
def test_real_files(name, classes, images, boxes, tmp_path):
    file = Path(os.environ.get("COMROPE_DATA") or "", f"{name}.tar")
    if not file.is_file():
        pytest.skip(f"COMROPE_DATA is not set, or has no {file.name}")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    for split, count, number in zip(("train", "val"), images, boxes, strict=True):
        data = Coco(tmp_path / name, split)
        assert (len(data), len(data.classes)) == (count, classes)
        assert len(data.boxes) + data.left_out == number
        assert sum(len(data.target(index).boxes) for index in range(count)) == len(data.boxes)
        data.load(count - 1)
