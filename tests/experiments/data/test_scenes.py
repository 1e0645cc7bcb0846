"""Digits scattered over a canvas."""

from __future__ import annotations

import numpy as np

from comrope.experiments.data.scenes import SIDE, Scenes


def ink(image) -> np.ndarray:
    """Return where a scene is brighter than its noise."""
    return np.asarray(image) > 60


def test_boxes_are_where_the_digits_are():
    scenes = Scenes(train=False)
    assert len(scenes) == 96
    for number in range(len(scenes)):
        image, target = scenes.load(number)
        assert (image.size, target.image_id) == ((SIDE, SIDE), number)
        rest, taken = ink(image), np.zeros((SIDE, SIDE), int)
        for left, top, right, bottom in target.boxes.int().tolist():
            assert 0 <= left < right <= SIDE
            assert 0 <= top < bottom <= SIDE
            assert np.asarray(image)[top:bottom, left:right].max() > 150
            rest[top:bottom, left:right] = False
            taken[top:bottom, left:right] += 1
        assert not rest.any()  # no digit elsewhere
        assert taken.max() == 1  # none over another
    counts = {len(scenes.load(number)[1].boxes) for number in range(len(scenes))}
    assert {2, 3} <= counts <= {1, 2, 3, 4}


def test_scenes_are_the_same_every_time_and_new_for_validation():
    first, again, validation = Scenes(train=True), Scenes(train=True), Scenes(train=False)
    assert len(first) == 512
    for number in (0, 5, 95):
        image = first.load(number)[0].tobytes()
        assert image == again.load(number)[0].tobytes() != validation.load(number)[0].tobytes()


def test_the_annotations_are_those_of_the_scenes():
    scenes = Scenes(train=False)
    annotations = scenes.truth["annotations"]
    assert len({a["id"] for a in annotations}) == len(annotations)
    assert all(a["id"] > 0 and not a["iscrowd"] for a in annotations)
    assert [c["name"] for c in scenes.truth["categories"]] == scenes.classes
    assert scenes.category_ids == list(range(10))
    for number in range(len(scenes)):
        target = scenes.load(number)[1]
        own = [a for a in annotations if a["image_id"] == number]
        assert [scenes.category_ids.index(a["category_id"]) + 1 for a in own] == (
            target.labels.tolist()
        )
        for annotation, (left, top, right, bottom) in zip(own, target.boxes.tolist(), strict=True):
            assert annotation["bbox"] == [left, top, right - left, bottom - top]
            assert annotation["area"] == (right - left) * (bottom - top)


def test_training_digits_are_in_training_scenes_only():
    train, validation = (Scenes(train=part).digits for part in (True, False))
    assert (len(train), len(validation)) == (1437, 360)
