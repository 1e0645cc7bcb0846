"""COCO's format: boxes, outlines, and annotation files that make no sense."""

from __future__ import annotations

import copy
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import raises_for
from PIL import Image
from pycocotools import mask

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.coco import Coco

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


def test_boxes_are_cut_off_at_edges_and_unusable_ones_left_out(write):
    data = Coco(write(TREE), "train")
    image, target = data.load(0)
    assert (image.mode, image.size, target.image_id) == ("RGB", (100, 80), 7)
    assert target.boxes.tolist() == [[10, 10, 30, 40], [90, 70, 100, 80]]
    assert target.boxes.dtype == torch.float32
    assert target.labels.tolist() == [2, 1]  # in the order of their ids, which have holes
    assert data.classes == ["car", "cup"]
    assert data.category_ids == [2, 90]
    assert data.left_out == 3
    empty = data.load(1)[1]
    assert empty.boxes.shape == (0, 4)
    assert empty.labels.shape == (0,)
    assert Coco(write(TREE), "train", "L").load(0)[0].mode == "L"


def test_evaluation_gets_all_annotations(write):
    truth = Coco(write(TREE), "train").truth
    assert [a["id"] for a in truth["annotations"]] == [1, 2, 3, 4, 5]
    assert [a["iscrowd"] for a in truth["annotations"]] == [0, 0, 0, 0, 1]
    assert [a["area"] for a in truth["annotations"]] == [600, 1600, 0, 81, 81]


def test_an_area_that_is_none_is_that_of_the_box(write):
    for area, expected in ((None, 20 * 30), (7, 7)):
        tree = changed(annotations__0__area=area)
        assert Coco(write(tree), "train").truth["annotations"][0]["area"] == expected


def test_loading_processes_do_not_get_the_file(write):
    source = Coco(write(with_outline(SQUARE)), "train", outlines=True)
    sent = pickle.loads(pickle.dumps(source))
    assert sent.truth is None
    assert source.truth is not None
    assert not any(isinstance(value, torch.Tensor) for value in vars(sent).values())
    for ours, theirs in zip(source.target(0), sent.target(0), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


# Outlines

SQUARE = [[10, 10, 30, 10, 30, 40, 10, 40]]


def with_outline(outline) -> dict:
    """One box, (20, 30) at (10, 10), with an outline."""
    return {**TREE, "annotations": [{**TREE["annotations"][0], "segmentation": outline}]}


def test_polygons_and_run_lengths_are_alike(write):
    packed = mask.merge(mask.frPyObjects(SQUARE, 80, 100))
    column = [80 * 10 + 10, 30, 80 * 89 + 40]  # the first column of the box
    outlines = (
        (SQUARE, (10, 10, 30, 40)),
        ([[1, 1, 9, 9], *SQUARE], (10, 10, 30, 40)),  # the first is none
        ({**packed, "counts": packed["counts"].decode()}, (10, 10, 30, 40)),
        ({"size": [80, 100], "counts": column}, (10, 10, 11, 40)),
    )
    for outline, (left, top, right, bottom) in outlines:
        (found,) = Coco(write(with_outline(outline)), "train", outlines=True).target(0).outlines
        expected = np.zeros((80, 100), np.uint8)
        expected[top:bottom, left:right] = 1
        assert np.array_equal(mask.decode(found), expected)
    assert Coco(write(with_outline(SQUARE)), "train").target(0).outlines == []


@pytest.mark.parametrize(
    ("outline", "problem"),
    [
        (None, "none"),
        ([[1, 1, 9, 9]], "three points"),
        ([[1, 1, 9, 9, 3, 5, 7]], "three points"),
        ({"size": [10, 10], "counts": [50, 50]}, r"\[10, 10\].*\[80, 100\]"),
        ({"size": [80, 100], "counts": "abc"}, "RLE"),
    ],
)
def test_unusable_outlines_are_named_if_masks_are_learned(outline, problem, write):
    root = write(with_outline(outline))
    with pytest.raises(UserError, match=rf"^detect\.kind: annotation 1 .*{problem}"):
        Coco(root, "train", outlines=True)
    assert len(Coco(root, "train").boxes) == 1


# Files


def test_images_that_are_missing_or_of_another_size(write):
    root = write(TREE)
    data = Coco(root, "train")
    Image.new("RGB", (61, 60)).save(root / "train" / "b.png")
    with pytest.raises(ValueError, match=r"60 x 60.* 61 x 60"):
        data.load(1)
    (root / "train" / "a.png").unlink()
    with pytest.raises(FileNotFoundError):
        data.load(0)
    assert data.name(0) == str(root / "train" / "a.png")


def test_places(write):
    root = write(TREE)
    annotations = root / "annotations"
    with raises_for("data.root", UserError) as caught:
        Coco(root, "val")
    assert "instances_train.json" in str(caught.value)
    (root / "train").rename(root / "train2017")
    with raises_for("data.root", UserError) as caught:
        Coco(root, "train")
    assert str(root / "train") in str(caught.value)
    (annotations / "instances_train.json").rename(annotations / "instances_train2017.json")
    for split in ("train", "train2017"):
        data = Coco(root, split)
        assert data.load(0)[0].size == (100, 80)
    (root / "train2017").rename(root / "images")
    assert Coco(root, "train").load(0)[0].size == (100, 80)


def changed(**values):
    """Return the annotations with other values, such as images__0__id."""
    tree = copy.deepcopy(TREE)
    for place, value in values.items():
        part, number, key = place.split("__")
        tree[part][int(number)][key] = value
    return tree


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ("{", "cannot be read"),
        ("[]", "images"),
        ({**TREE, "categories": []}, "categories"),
        (changed(annotations__0__image_id=8), "annotation 1: .*image 8"),
        (changed(annotations__0__category_id=1), "annotation 1: .*category 1"),
        (changed(annotations__1__id=1), r"annotations\[1\].*got 1"),
        (changed(annotations__0__bbox=[1, 2, 3]), "annotation 1: .*bbox"),
        (changed(annotations__0__bbox=[1, 2, 3, None]), "annotation 1: .*bbox"),
        (changed(annotations__0__bbox=[1, 2, 3, float("nan")]), "annotation 1: .*bbox"),
        (changed(images__0__file_name="../../x"), r"\.\./\.\./x"),
        (changed(images__0__file_name="/etc/passwd"), "/etc/passwd"),
        (changed(images__0__file_name="..\\x"), "file"),
        ({**TREE, "images": [{"id": 1}]}, r"images\[0\].*file_name"),
        ({**TREE, "images": [3]}, r"images\[0\].*id"),
        (changed(images__0__width="90"), "image 7: .*width.*'90'"),
        (changed(images__0__height=None), "image 7: .*height.*None"),
        ({**changed(images__0__id=2**70), "annotations": []}, r"images\[0\].*id"),
        ({**changed(images__0__id=-1), "annotations": []}, r"images\[0\].*id.*-1"),
    ],
)
def test_annotations_that_make_no_sense_are_named(tree, found, write):
    with pytest.raises(UserError, match=rf"instances_train\.json: .*{found}"):
        Coco(write(tree), "train")


def test_bccd_as_it_is_distributed(tmp_path):
    file = Path(os.environ.get("COMROPE_DATA") or "", "bccd.tar")
    if not file.is_file():
        pytest.skip(f"COMROPE_DATA is not set, or has no {file.name}")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    for split, images, boxes in (("train", 292, 3941), ("val", 72, 945)):
        data = Coco(tmp_path / "bccd", split)
        assert (len(data), len(data.classes)) == (images, 3)
        assert len(data.boxes) + data.left_out == boxes
        assert sum(len(data.target(index).boxes) for index in range(images)) == len(data.boxes)
        data.load(images - 1)
