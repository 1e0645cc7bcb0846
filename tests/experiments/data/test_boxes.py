"""Images with boxes: pixels, boxes and masks are augmented together."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from helpers import raises_for
from PIL import Image
from support.faults import raises_line

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import IGNORED, Key
from comrope.experiments.data.boxes import BoxDataset, collate_boxes, open_boxes

BOX = [20, 10, 30, 16]  # left, top, width, height
POLYGON = [[20, 10, 50, 10, 50, 26, 20, 26]]


@pytest.fixture
def folder(tmp_path):
    """Two images a split, 80 x 48: in 7.png a box of category 90 on blue, red and to the right
    orange; nothing in 3.png."""
    pixels = np.zeros((48, 80, 3), np.uint8)
    pixels[..., 2] = 255
    pixels[10:26, 20:50] = (255, 0, 0)
    pixels[10:26, 35:50] = (255, 150, 0)
    tree = {
        "images": [
            {"id": 7, "file_name": "7.png", "width": 80, "height": 48},
            {"id": 3, "file_name": "3.png", "width": 80, "height": 48},
        ],
        "categories": [{"id": 90, "name": "cup"}, {"id": 2, "name": "car"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 90, "bbox": BOX, "segmentation": POLYGON}
        ],
    }
    (tmp_path / "annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
        Image.fromarray(pixels).save(tmp_path / split / "7.png")
        Image.fromarray(pixels * 0).save(tmp_path / split / "3.png")
    return tmp_path


def opened(folder, **options):
    root = None if folder is None else str(folder)
    options = {"name": "coco", "num_classes": 2, **options}
    return open_boxes(root=root, splits=("train", "val"), **options)


def dataset_of(source, **options) -> BoxDataset:
    usual = {"image_size": 64, "jitter": (0.8, 1.25), "hflip": 0.0, "fill": (0.5,) * 3}
    return BoxDataset(source, **{"seed": 0, "training": True, **usual, **options})


def edges(region) -> list:
    """Return left, top, right, bottom of what is true."""
    rows, columns = region.any(1).nonzero(), region.any(0).nonzero()
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


# Augmentation


def test_boxes_and_masks_follow_the_pixels(folder):
    source = opened(folder, masks=True)[0]
    images = dataset_of(source, masks=True, jitter=(0.4, 2.0), hflip=0.5)
    flips, widths = set(), set()
    for place in range(60):
        image, target, _ = images[Key(3, place, 0)].image
        assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
        red = (image[0].int() - image[2].int()) > 0
        if not len(target["boxes"]):
            assert red.sum() <= 2 * 64  # cut away, all but what is less than a pixel wide
            assert target["masks"].shape == (0, 64, 64)
            continue
        assert target["labels"].tolist() == [2]
        wanted = torch.stack(edges(red)).float()
        torch.testing.assert_close(target["boxes"][0], wanted, rtol=0, atol=1.5)
        masked = torch.stack(edges(target["masks"][0] > 0)).float()
        torch.testing.assert_close(masked, wanted, rtol=0, atol=1.5)
        orange = (image[1] > 90) & red
        if orange.any() and (red & ~orange).any():
            left, _, right, _ = edges(orange)
            flips.add(bool(left + right < wanted[0] + wanted[2]))
        widths.add(int(wanted[2] - wanted[0]))
    assert flips == {True, False}
    assert min(widths) < 15
    assert max(widths) > 40


def test_a_draw_is_a_function_of_seed_epoch_and_place(folder):
    source = opened(folder)[0]
    images = dataset_of(source)
    first = images[Key(0, 5, 0)].image
    same = images[Key(0, 5, 0)].image
    assert torch.equal(first[0], same[0])
    assert torch.equal(first[1]["boxes"], same[1]["boxes"])
    others = images[Key(0, 6, 0)], images[Key(1, 5, 0)], dataset_of(source, seed=1)[Key(0, 5, 0)]
    assert not any(torch.equal(first[0], other.image[0]) for other in others)


def test_flips_have_their_probability(folder):
    source = opened(folder)[0]
    for hflip, expected in ((0.0, [20, 50]), (1.0, [30, 60])):
        images = dataset_of(source, image_size=80, jitter=(1.0, 1.0), hflip=hflip)
        for place in range(5):
            box = images[Key(0, place, 0)].image[1]["boxes"][0]
            assert [box[0].item(), box[2].item()] == expected


def test_the_square_is_filled_with_its_value(folder):
    images = dataset_of(opened(folder)[0], jitter=(0.5, 0.5), fill=(0.5, 0.2, 1.0))
    image = images[Key(0, 0, 0)].image[0]
    for channel, value in zip(image, (128, 51, 255), strict=True):
        assert (channel[40:] == value).all()
        assert (channel[:, 40:] == value).all()


def test_evaluation_images_are_unchanged(folder):
    source = opened(folder, train=False)[0]
    images = dataset_of(source, training=False, masks=True)
    batch = collate_boxes([images[Key(0, 0, 0)], images[Key(0, 1, 1)], images[Key(0, -1, 1)]])
    seen, targets = batch.on(torch.device("cpu"))
    assert [image.shape for image in seen] == [(3, 48, 80), (3, 48, 80), (3, 8, 8)]
    assert seen[0][:, 0, 0].tolist() == [0, 0, 1]
    assert targets[0]["boxes"].tolist() == [[20, 10, 50, 26]]
    assert targets[0]["labels"].tolist() == [2]
    assert targets[1]["boxes"].shape == (0, 4)  # an image without boxes is one
    assert batch.image_ids == [7, 3, IGNORED]


def test_masks_are_the_outlines(folder):
    from pycocotools import mask

    file = folder / "annotations" / "instances_train.json"
    tree = json.loads(file.read_text())
    (first,) = tree["annotations"]
    packed = mask.merge(mask.frPyObjects(POLYGON, 48, 80))
    loose = {"size": [48, 80], "counts": [48 * 20 + 10, 16, 48 * 60 - 26]}  # its first column
    outlines = [POLYGON, {**packed, "counts": packed["counts"].decode()}, loose]
    tree["annotations"] = [
        {**first, "id": number, "segmentation": outline} for number, outline in enumerate(outlines)
    ]
    file.write_text(json.dumps(tree))
    images = dataset_of(opened(folder, masks=True)[0], masks=True, image_size=80, jitter=(1.0, 1.0))
    polygon, runs, column = images[Key(0, 0, 0)].image[1]["masks"]
    assert torch.equal(polygon, runs)
    assert edges(polygon > 0) == [20, 10, 50, 26]
    assert edges(column > 0) == [20, 10, 21, 26]


# Batches


def test_a_batch_has_few_tensors_and_gives_each_image_its_boxes(folder):
    images = dataset_of(opened(folder, masks=True)[0], masks=True, jitter=(1.0, 1.0))
    items = [images[Key(0, place, sample)] for place, sample in enumerate((0, 1, 0))]
    batch = collate_boxes([items[0]._replace(unreadable=["a"], fatal="b"), *items[1:]])
    assert batch.images.shape == (3, 3, 64, 64)
    assert (batch.counts, batch.image_ids) == ([1, 0, 1], [7, 3, 7])
    assert (batch.unreadable, batch.fatal) == (["a"], "b")
    seen, targets = batch.on(torch.device("cpu"))
    for item, image, target in zip(items, seen, targets, strict=True):
        assert torch.equal(image, item.image[0] / 255)
        assert target.keys() == {"boxes", "labels", "masks"}
        assert all(torch.equal(target[name], item.image[1][name]) for name in target)


@pytest.mark.parametrize("masks", [False, True])
def test_an_unreadable_image_is_named_or_the_next_one_takes_its_place(folder, masks):
    bad = folder / "train" / "7.png"
    bad.unlink()
    source = opened(folder, masks=masks)[0]
    assert str(bad) in dataset_of(source, masks=masks)[Key(0, 0, 0)].fatal
    item = dataset_of(source, masks=masks, skip=True)[Key(0, 0, 0)]
    assert (item.fatal, item.unreadable, item.image[2]) == (None, [str(bad)], 3)
    blank = dataset_of(source, masks=masks, skip=True, training=False)[Key(0, 0, 0)]
    assert (blank.image[2], len(blank.image[1]["boxes"])) == (IGNORED, 0)
    both = collate_boxes([dataset_of(source, masks=masks)[Key(0, -1, 0)], item])  # fits a batch
    assert both.image_ids == [IGNORED, 3]


# Data sets


def test_splits_are_opened_together_or_validation_alone(folder):
    for options in ({}, {"name": "scenes", "num_classes": 10}):
        where = None if options else folder
        train, validation = opened(where, **options)
        (alone,) = opened(where, train=False, **options)
        assert len(alone) == len(validation)
        assert validation.truth["annotations"] == alone.truth["annotations"]
        assert alone.truth["annotations"]
        assert not train.truth  # COCO's is gigabytes, and only validation needs it
    assert train.load(0)[0].mode == "L"
    assert opened(folder, mode="L")[0].load(0)[0].mode == "L"


def changed(folder, split: str, change) -> None:
    file = folder / "annotations" / f"instances_{split}.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def without_outline(tree) -> None:
    del tree["annotations"][0]["segmentation"]


def test_masks_need_outlines_in_both_splits(folder):
    changed(folder, "val", without_outline)
    opened(folder)
    for train in (True, False):
        with raises_line("instances_val.json: annotation 1: ", "detect.kind"):
            opened(folder, masks=True, train=train)
    with raises_for("detect.kind", UserError):
        opened(None, name="scenes", num_classes=10, masks=True)


def outside(tree) -> None:
    tree["annotations"][0]["bbox"][0] = 200


def no_boxes(tree) -> None:
    tree["annotations"] = []


def crowd(tree) -> None:
    tree["annotations"][0]["iscrowd"] = 1


def other_category(tree) -> None:
    tree["annotations"][0]["category_id"] = tree["categories"][0]["id"] = 91


@pytest.mark.parametrize(
    ("split", "change", "found"),
    [
        ("train", outside, "'train'"),
        ("train", no_boxes, "box"),
        ("val", no_boxes, "box"),
        ("val", crowd, "box"),
        ("val", other_category, "categories"),
    ],
)
def test_annotations_without_use_are_refused(folder, split, change, found):
    changed(folder, split, change)
    with raises_for("data.root", UserError) as caught:
        opened(folder)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_classes": 3}, "data.num_classes"),
        ({"name": "scenes", "num_classes": 3}, "data.num_classes"),
        ({"name": "voc"}, "data.name"),
    ],
)
def test_data_sets_that_do_not_exist_are_refused(folder, options, argument):
    with raises_for(argument, UserError):
        opened(folder, **options)
    with raises_for("data.root", UserError):
        opened(None)


@pytest.mark.parametrize("package", ["pycocotools", "torchvision"])
def test_packages_that_detection_needs_are_named(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with raises_for("data.name", UserError) as caught:
        opened(None, name="scenes", num_classes=10)
    assert package in str(caught.value)
