"""Training images that validate: kept out of training, and looked at as validation images are."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data.batches import Validation
from comrope.experiments.data.holdout import draw
from comrope.experiments.data.images import open_sources
from comrope.experiments.tasks.views import usual_view
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.train import train
from experiments.images import config_for, shards_of, tar_of
from experiments.runs import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def contents(source) -> list[tuple[int, bytes]]:
    return [(t, np.asarray(image).tobytes()) for image, t in map(source.load, range(len(source)))]


@pytest.mark.parametrize(("count", "share"), [(48, 0.25), (9469, 0.2), (10, 0.9), (7, 0.1)])
def test_the_draw_is_a_function_of_the_number_of_images(count, share):
    chosen = draw(count, share).tolist()
    assert chosen == draw(count, share).tolist()
    assert len(chosen) == len(set(chosen)) == round(share * count)
    assert set(chosen) <= set(range(count))


def test_another_number_of_images_is_another_draw():
    assert draw(20, 0.25).tolist() == [0, 4, 8, 13, 16]  # on every machine: runs depend on it
    ones = {tuple(np.diff(draw(count, 0.2))[:20]) for count in range(200, 210)}
    assert len(ones) == 10


def test_parts_are_disjoint_complete_and_the_same_for_every_seed(folder):
    every, _ = open_sources(config_for(folder))
    fields = {"data__holdout": 0.25}
    parts = [open_sources(config_for(folder, **fields, train__seed=seed)) for seed in (0, 1)]
    for kept, held in parts:
        assert (len(kept), len(held)) == (36, 12)
        assert sorted(names(kept) + names(held)) == sorted(names(every))
    assert names(parts[0][1]) == names(parts[1][1])
    classes = Counter(target for target, _ in contents(parts[0][1]))
    assert classes == {0: 6, 1: 6}  # class by class in a folder, so as many of each


def test_to_evaluate_opens_the_same_images_cached_or_not(folder):
    expected = contents(open_sources(config_for(folder, data__holdout=0.25))[1])
    for cache in (False, True):
        config = config_for(folder, data__holdout=0.25, data__cache=cache)
        assert contents(open_sources(config, train=False)[1]) == expected
        assert contents(open_sources(config)[1]) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's open file
@pytest.mark.parametrize(("name", "pack"), [("folder", tar_of), ("shards", shards_of)])
def test_tars_and_shards_hold_out_too(name, pack, folder, tmp_path_factory):
    packed = tmp_path_factory.mktemp("packed")
    pack(folder, packed)
    kept, held = open_sources(config_for(packed, data__name=name, data__holdout=0.25))
    every, _ = open_sources(config_for(packed, data__name=name))
    assert sorted(contents(kept) + contents(held)) == sorted(contents(every))
    assert len(held) == 12


def test_digits_hold_out_too():
    kept, held = open_sources(tiny(data__holdout=0.2))
    assert (len(kept), len(held)) == (1150, 287)


def test_what_is_held_out_validates_and_is_never_trained_on(folder, tmp_path):
    """Whoever would look at an image that cannot be read counts it."""
    shutil.rmtree(folder / "val")  # nobody asks for the usual validation set
    config = config_for(
        folder, data__holdout=0.25, data__unreadable="skip", train__batch_size=12, evaluate__every=0
    )
    kept, held = open_sources(config)
    for part, source in (("validation", held), ("training", kept)):
        bad = Path(source.name(5))
        whole = bad.read_bytes()
        os.truncate(bad, 30)
        result = train(config, tmp_path / part, progress=False)
        bad.write_bytes(whole)
        looked_at = {"training": config.train.epochs, "validation": 1}[part]
        assert result["unreadable"] == {"training": 0, "validation": 0} | {part: looked_at}
        assert result["steps"] == 6  # 36 images, twelve a step, twice
        assert sum(map(sum, result["taken_for"])) == 12 - (part == "validation")


def test_a_run_is_evaluated_on_what_it_held_out_unless_told_otherwise(folder, tmp_path):
    result = train(config_for(folder, data__holdout=0.25), tmp_path / "run", progress=False)
    (same,) = evaluate_run(tmp_path / "run", progress=False)
    assert (same["images"], same["top1"]) == (12, result["top1"]["16"])
    (usual,) = evaluate_run(tmp_path / "run", overrides=["data.holdout=0"], progress=False)
    assert usual["images"] == 16
    with pytest.raises(UserError, match=r"data.holdout: expected 0.25, as it was trained"):
        evaluate_run(tmp_path / "run", overrides=["data.holdout=0.5"], progress=False)


def test_no_run_starts_from_one_that_has_seen_what_it_holds_out(folder, tmp_path):
    train(config_for(folder), tmp_path / "all", progress=False)
    later = config_for(folder, data__holdout=0.25, train__start_from=str(tmp_path / "all"))
    with pytest.raises(UserError, match=r"data.holdout: expected 0, that of .*all, or 0, got 0.25"):
        train(later, tmp_path / "later", progress=False)


def test_held_out_images_are_looked_at_as_validation_images_are(folder, tmp_path):
    """Not augmented: they come as they would from a validation folder that has them."""
    config = config_for(folder, data__holdout=0.25, augment__scale=(0.1, 0.5), augment__hflip=1.0)
    held = open_sources(config)[1]
    shutil.copytree(folder / "train", tmp_path / "usual" / "train")
    for name in map(Path, names(held)):
        target = tmp_path / "usual" / "val" / name.parent.name / name.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, target)
    usual = open_sources(config_for(tmp_path / "usual"))[1]
    for seed in (0, 1):
        seeded = config.with_overrides({"train.seed": seed})
        (found,), (expected,) = (
            list(Validation(seeded, source).batches(usual_view(config))) for source in (held, usual)
        )
        assert torch.equal(found.images, expected.images)
        assert torch.equal(found.targets, expected.targets)


@pytest.mark.parametrize(
    ("recipe", "share", "message"),
    [
        ("moving", 0.2, "data.holdout: clips cannot be held out; expected 0, got 0.2"),
        ("scenes", 0.2, "data.holdout: images with boxes cannot be held out; expected 0, got 0.2"),
        ("digits", 1, "data.holdout: expected a share below 1, got 1"),
        ("digits", -0.1, "data.holdout: expected a number of at least 0, got -0.1"),
    ],
)
def test_what_cannot_be_held_out_is_refused(recipe, share, message):
    with pytest.raises(UserError, match=message):
        load_recipe(recipe).with_overrides({"data.holdout": share})


def test_a_share_that_is_no_image_or_all_is_refused(folder):
    for share in (0.001, 0.999):
        with pytest.raises(UserError, match=rf"data.holdout: .* of the 48 .*got {share}"):
            open_sources(config_for(folder, data__holdout=share))
