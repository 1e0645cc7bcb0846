"""Annotation files: where they are, and what is read of them. Wrong ones: faults/test_coco."""

from __future__ import annotations

import json

import pytest
from helpers import raises_for
from support.coco import TREE, changed, write_coco

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.coco_files import find_split, read_annotations


def read(root, tree):
    return read_annotations(find_split(write_coco(root, tree), "train")[1])


def test_places(tmp_path):
    root = write_coco(tmp_path, TREE)
    annotations = root / "annotations"
    with raises_for("data.root", UserError, naming="instances_train.json"):
        find_split(root, "val")
    (root / "train").rename(root / "train2017")
    with raises_for("data.root", UserError, naming=str(root / "train")):
        find_split(root, "train")
    file = (annotations / "instances_train.json").rename(annotations / "instances_train2017.json")
    for split in ("train", "train2017"):
        assert find_split(root, split) == (root / "train2017", file)
    (root / "train2017").rename(root / "images")
    assert find_split(root, "train") == (root / "images", file)


def test_fields_that_are_not_used_are_dropped(tmp_path):
    tree = json.loads(json.dumps(TREE))
    for part in tree.values():
        part[0]["more"] = [[["deep"]]]
    found = read(tmp_path, {"info": {"year": 2017}, "licenses": [], **tree})
    assert list(found) == ["images", "categories", "annotations"]
    assert found["images"] == TREE["images"]
    assert found["categories"] == TREE["categories"]
    fields = {"id", "image_id", "category_id", "bbox", "area", "iscrowd"}
    assert all(annotation.keys() == fields for annotation in found["annotations"])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("area", None, 600),  # of the box, as without the field
        ("area", 7, 7),
        ("area", 0.0, 0.0),
        ("iscrowd", None, 0),
        ("iscrowd", True, 1),
        ("iscrowd", 1, 1),
        ("iscrowd", 0.0, 0),
        ("segmentation", [], []),
        ("id", 2**63 - 1, 2**63 - 1),
    ],
)
def test_values_that_files_of_others_have(name, value, expected, tmp_path):
    found = read(tmp_path, changed(**{f"annotations__0__{name}": value}))["annotations"][0][name]
    assert (found, type(found)) == (expected, type(expected))


def test_names_of_categories_may_be_equal_but_not_their_ids(tmp_path):
    """Exports of Roboflow have a category of no objects with the name of the data set."""
    found = read(tmp_path, changed(categories__0__name="car"))["categories"]
    assert [(category["id"], category["name"]) for category in found] == [(90, "car"), (2, "car")]
    for name in ("größe", "猫 ☕", ""):
        assert read(tmp_path, changed(categories__0__name=name))["categories"][0]["name"] == name
