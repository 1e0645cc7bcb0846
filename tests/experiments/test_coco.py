"""COCO's format, whole and broken, and its metrics on a case that can be done by hand."""

from __future__ import annotations

import copy
import json
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from comrope.experiments.coco import METRICS, Coco, metrics
from comrope.experiments.errors import UserError

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
        (changed(annotations__1__id=1), "an id of its own, got 1"),
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
    pytest.importorskip("pycocotools")
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
        assert sum(len(target.boxes) for target in data.targets) + data.left_out == number
        data.load(count - 1)
