"""COCO's format: boxes, outlines, images, and what training leaves out."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask
from support.coco import SQUARE, TREE, with_outline, write_coco
from support.faults import raises_line

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.coco import Coco


@pytest.fixture
def write(tmp_path):
    return functools.partial(write_coco, tmp_path)


def test_boxes_are_cut_off_at_edges_and_unusable_ones_left_out(write):
    data = Coco(write(TREE), "train")
    image, target = data.load(0)
    assert (image.mode, image.size, target.image_id) == ("RGB", (100, 80), 7)
    assert target.boxes.tolist() == [[10, 10, 30, 40], [90, 70, 100, 80]]
    assert target.boxes.dtype == torch.float32
    assert target.labels.tolist() == [2, 1]  # in the order of their ids, which have holes
    assert data.classes == ["car", "cup"]
    assert data.category_ids == [2, 90]
    assert data.left_out == {
        "crowds": [5],
        "boxes outside of their images or without area": [3, 4],
    }
    empty = data.load(1)[1]
    assert empty.boxes.shape == (0, 4)
    assert empty.labels.shape == (0,)
    assert Coco(write(TREE), "train", "L").load(0)[0].mode == "L"


def test_evaluation_gets_all_annotations(write):
    truth = Coco(write(TREE), "train").truth
    assert [a["id"] for a in truth["annotations"]] == [1, 2, 3, 4, 5]
    assert [a["iscrowd"] for a in truth["annotations"]] == [0, 0, 0, 0, 1]
    assert [a["area"] for a in truth["annotations"]] == [600, 1600, 0, 81, 81]


def test_the_garbage_collector_runs_again(write):
    for tree in (TREE, "{"):
        with contextlib.suppress(UserError):
            Coco(write(tree), "train")
        assert gc.isenabled()


def test_loading_processes_do_not_get_the_file(write):
    source = Coco(write(with_outline(SQUARE)), "train", outlines=True)
    sent = pickle.loads(pickle.dumps(source))
    assert sent.truth is None
    assert source.truth is not None
    assert not any(isinstance(value, torch.Tensor) for value in vars(sent).values())
    for ours, theirs in zip(source.target(0), sent.target(0), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


# Outlines


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


def test_objects_without_a_pixel_are_left_out_of_training_only(write):
    blank = {
        "two points": [[10, 10, 30, 40]],
        "outside": [[110, 10, 130, 10, 130, 40]],
        "no runs": {"size": [80, 100], "counts": [8000]},
    }
    own = [
        {**TREE["annotations"][0], "id": n, "segmentation": o} for n, o in enumerate(blank.values())
    ]
    whole = {**TREE["annotations"][0], "id": 9, "segmentation": SQUARE}
    data = Coco(write({**TREE, "annotations": [*own, whole]}), "train", outlines=True)
    assert data.left_out == {"outlines without a pixel": [0, 1, 2]}
    assert len(data.target(0).boxes) == len(data.target(0).outlines) == 1
    truth = data.truth["annotations"]
    assert [int(mask.area(a["segmentation"])) for a in truth] == [0, 0, 0, 600]


def test_a_wrong_outline_is_named_if_masks_are_learned(write):
    root = write(with_outline([[10, 10, 30, float("nan"), 30, 40]]))
    with raises_line("instances_train.json: annotation 1: segmentation: ", "detect.kind=box"):
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


def test_bccd_as_it_is_distributed(tmp_path):
    file = Path(os.environ.get("COMROPE_DATA") or "", "bccd.tar")
    if not file.is_file():
        pytest.skip(f"COMROPE_DATA is not set, or has no {file.name}")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    for split, images, boxes in (("train", 292, 3941), ("val", 72, 945)):
        data = Coco(tmp_path / "bccd", split)
        assert (len(data), len(data.classes)) == (images, 3)
        assert len(data.boxes) + sum(map(len, data.left_out.values())) == boxes
        assert sum(len(data.target(index).boxes) for index in range(images)) == len(data.boxes)
        data.load(images - 1)
