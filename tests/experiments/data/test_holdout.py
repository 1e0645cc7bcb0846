"""Training images that are held out to validate with."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from helpers import raises_for
from support.images import contents, open_folder, shards_of, tar_of

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.holdout import draw, held_out
from comrope.experiments.data.images import CachedImages, Digits


@pytest.mark.parametrize(("count", "share"), [(48, 0.25), (9469, 0.2), (10, 0.9), (7, 0.1)])
def test_the_draw_is_a_function_of_the_number_of_images(count, share):
    chosen = draw(count, share).tolist()
    assert chosen == draw(count, share).tolist()
    assert len(chosen) == len(set(chosen)) == round(share * count)
    assert set(chosen) <= set(range(count))


def test_another_number_of_images_is_another_draw():
    assert draw(20, 0.25).tolist() == [0, 4, 8, 13, 16]  # on every machine: runs depend on it
    steps = {tuple(np.diff(draw(count, 0.2))[:20]) for count in range(200, 210)}
    assert len(steps) == 10


def names(source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def test_parts_are_disjoint_complete_and_have_each_class_in_proportion(folder):
    (source,) = open_folder(folder, ["train"])
    kept, held = held_out(source, 0.25)
    assert (len(kept), len(held)) == (36, 12)
    assert sorted(names(kept) + names(held)) == sorted(names(source))
    assert sorted(contents(kept) + contents(held)) == sorted(contents(source))
    by_name = dict(zip(names(source), contents(source), strict=True))
    assert [by_name[name] for name in names(held)] == contents(held)
    # Class by class in a folder, so as many of each.
    assert Counter(target for target, _ in contents(held)) == {0: 6, 1: 6}
    assert [len(part) for part in held_out(Digits(train=True), 0.2)] == [1150, 287]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's open file
@pytest.mark.usefixtures("server")
def test_every_layout_can_be_divided(folder, tmp_path_factory):
    expected = [contents(part) for part in held_out(open_folder(folder, ["train"])[0], 0.25)]
    for name, pack in (("folder", tar_of), ("shards", shards_of)):
        packed = tmp_path_factory.mktemp("packed")
        pack(folder, packed)
        (source,) = open_folder(packed, ["train"], name=name)
        parts = held_out(source, 0.25)
        assert [len(part) for part in parts] == [36, 12]
        assert sorted(chain(*map(contents, parts))) == sorted(chain(*expected))
    cached = [contents(CachedImages(p)) for p in held_out(open_folder(folder, ["train"])[0], 0.25)]
    assert cached == expected


def test_a_share_that_leaves_no_image_on_a_side_is_refused(folder):
    for share in (0.001, 0.999):
        with raises_for("data.holdout", UserError) as caught:
            held_out(open_folder(folder, ["train"])[0], share)
        assert f"{share}" in str(caught.value)
        assert "48" in str(caught.value)
