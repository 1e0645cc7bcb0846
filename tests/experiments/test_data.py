"""Images: in an order that is a function of the seed, whole or skipped by name."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.batches import (
    IGNORED,
    Images,
    Key,
    TrainBatches,
    Validation,
    train_loader,
)
from comrope.experiments.data.images import Digits, open_sources
from comrope.experiments.tasks.views import View
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.train import train
from experiments.images import config_for, shards_of, spoil, tar_of
from experiments.runs import tiny


def test_an_epoch_is_every_image_once_and_another_order_each_time():
    batches = TrainBatches(tiny(train__epochs=3), 1437)
    keys = [key for batch in batches for key in batch]
    by_epoch = [[k.image for k in keys if k.epoch == e] for e in range(3)]
    assert all(len(set(images)) == len(images) == 1320 for images in by_epoch)
    assert len({tuple(images) for images in by_epoch}) == 3


@pytest.mark.parametrize(("world", "parts"), [(2, 1), (1, 4), (3, 2)])
def test_processes_and_parts_share_out_the_same_batches(world, parts):
    whole = list(TrainBatches(tiny(), 1437))
    config = tiny(train__accumulate=parts)
    shares = [list(TrainBatches(config, 1437, rank=r, world=world)) for r in range(world)]
    for step, batch in enumerate(whole):
        joined = [
            key
            for share in shares
            for part in share[step * parts : (step + 1) * parts]
            for key in part
        ]
        assert joined == batch


def test_a_resumed_order_is_the_rest_of_it():
    assert list(TrainBatches(tiny(), 1437, start=7)) == list(TrainBatches(tiny(), 1437))[7:]


def test_repeated_augmentation_repeats_images_but_not_their_augmentation():
    batches = TrainBatches(tiny(augment__repeats=3), 1437)
    keys = next(iter(batches))
    assert set(Counter(k.image for k in keys).values()) == {3}
    loader = train_loader(tiny(augment__repeats=3), Digits(train=True), batches)
    images = next(iter(loader)).images
    assert not torch.equal(images[0], images[1])


def test_augmentation_depends_on_epoch_and_place_only_and_disturbs_nothing():
    import random

    config = tiny(augment__scale=(0.1, 1.0))
    loader = train_loader(config, Digits(train=True), TrainBatches(config, 1437))
    images: Images = loader.dataset
    random.seed(1), torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    first = images[Key(0, 5, 9)].image
    assert torch.equal(images[Key(0, 5, 9)].image, first)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not torch.equal(images[Key(1, 5, 9)].image, first)
    assert not torch.equal(images[Key(0, 6, 9)].image, first)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("resolution", [12, 24])
def test_evaluation_counts_every_image_once_however_many_processes(world, resolution):
    config = tiny(evaluate__batch_size=100)
    parts = [Validation(config, Digits(train=False), rank=r, world=world) for r in range(world)]
    batches = [list(part.batches(View(resolution))) for part in parts]
    assert len({len(some) for some in batches}) == 1
    assert sum(int((b.targets != IGNORED).sum()) for some in batches for b in some) == 360


def test_formats_and_modes(folder):
    source, validation = open_sources(config_for(folder))
    assert (len(source), len(validation)) == (48, 16)
    images = [source.load(i)[0] for i in range(len(source))]
    assert {image.mode for image in images} == {"RGB"}
    cached, _ = open_sources(config_for(folder, data__cache=True))
    for i, image in enumerate(images):
        assert np.array_equal(np.asarray(cached.load(i)[0]), np.asarray(image))
        assert cached.load(i)[1] == source.load(i)[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's open file
@pytest.mark.parametrize(("name", "pack"), [("folder", tar_of), ("shards", shards_of)])
def test_tars_and_shards_hold_what_the_folder_holds(name, pack, folder, tmp_path_factory):
    packed = tmp_path_factory.mktemp("packed")
    pack(folder, packed)
    expected = open_sources(config_for(folder))
    found = open_sources(config_for(packed, data__name=name))
    for ours, theirs in zip(found, expected, strict=True):
        contents = [
            sorted((t, np.asarray(i).tobytes()) for i, t in map(s.load, range(len(s))))
            for s in (ours, theirs)
        ]
        assert contents[0] == contents[1]


def test_a_spoilt_sample_of_a_shard_is_named(folder, tmp_path_factory, tmp_path):
    packed = tmp_path_factory.mktemp("packed")
    spoil(folder, "train")
    shards_of(folder, packed)
    config = config_for(packed, data__name="shards")
    with pytest.raises(UserError, match=r"set-train-0\d+\.tar: dog_3: cannot be read"):
        train(config, tmp_path / "run", progress=False)
    (packed / "set-train-0000.tar").write_bytes(b"not a tar")
    with pytest.raises(UserError, match=r"set-train-0000\.tar: cannot be read"):
        train(config, tmp_path / "run", progress=False)


def test_data_sets_whose_classes_are_numbers_keep_them(monkeypatch):
    """Hugging Face's are: a map of class names would be applied to numbers, and fail."""
    import timm.data

    class Reader:
        class_to_idx: ClassVar = {"cat": 0, "dog": 1}

        def __getitem__(self, index):
            return Image.new("L", (8, 8), 100 * index), index

    class Set(list):
        reader = Reader()

    monkeypatch.setattr(timm.data, "create_dataset", lambda *_, **__: [(Image.new("L", (8, 8)), 1)])
    plain = open_sources(config_for(None, data__name="torch/pets", data__root=None))
    assert [source.load(0)[1] for source in plain] == [1, 1]
    asked = []

    def create(name, **options):
        asked.append((name, options))
        return Set([0, 1])

    monkeypatch.setattr(timm.data, "create_dataset", create)
    config = config_for(None, data__name="hfds/pets", data__root=None)
    for source in open_sources(config):
        assert [source.load(i)[1] for i in range(len(source))] == [0, 1]
        assert source.load(0)[0].mode == "RGB"
    assert all(name == "hfds/pets" and "class_map" not in o for name, o in asked)
    assert {o["split"] for _, o in asked} == {"train", "validation"}


def test_a_class_out_of_range_is_named(folder, tmp_path_factory, tmp_path):
    packed = tmp_path_factory.mktemp("packed")
    shards_of(folder, packed)
    config = config_for(packed, data__name="shards", data__num_classes=1)
    with pytest.raises(UserError, match=r"dog_\d+: cannot be read \(class 1, expected less than 1"):
        train(config, tmp_path / "run", progress=False)


def test_shards_of_another_split_are_left_out(folder, tmp_path_factory):
    packed = tmp_path_factory.mktemp("packed")
    shards_of(folder, packed)
    (packed / "set-train-0000.tar").rename(packed / "retrieval-train-0000.tar")
    found = open_sources(config_for(packed, data__name="shards"))
    assert [len(source) for source in found] == [48, 16]


def test_evaluation_needs_no_training_images(folder, tmp_path):
    import shutil

    train(config_for(folder, train__epochs=1), tmp_path / "run", progress=False)
    before = evaluate_run(tmp_path / "run", progress=False)
    shutil.rmtree(folder / "train")
    assert evaluate_run(tmp_path / "run", progress=False) == before


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache", [False, True])
def test_unreadable_images_stop_the_run_by_name(folder, workers, cache, tmp_path):
    bad = spoil(folder, "train")
    config = config_for(folder, data__workers=workers, data__cache=cache)
    with pytest.raises(UserError, match=rf"{bad}: cannot be read .*data.unreadable=skip"):
        train(config, tmp_path / "run", progress=False)
    going_on = config.with_overrides({"data.unreadable": "skip"})
    assert train(going_on, tmp_path / "run", progress=False)["unreadable"]["training"] == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_or_are_skipped_named_and_counted(folder, workers, tmp_path, capfd):
    bad, other = spoil(folder, "train"), spoil(folder, "val")
    config = config_for(folder, data__workers=workers, data__unreadable="skip")
    result = train(config, tmp_path / "run", progress=False)
    assert result["unreadable"] == {"training": 2, "validation": 1}
    assert result["images"] == 15
    assert f"skipped, cannot be read: {bad}" in capfd.readouterr().err
    (entry,) = evaluate_run(tmp_path / "run", progress=False)
    assert (entry["images"], entry["unreadable"]) == (15, 1)
    assert other.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__root": "/no/such/place"}, "data.root: /no/such/place is not there"),
        ({"data__root": None}, "data.root: not given"),
        ({"data__num_classes": 3}, "has 2 classes, got 3"),
        ({"data__train_split": "fit"}, "has no folder or .tar for split 'fit'; found train, val"),
        ({"data__name": "imagenet"}, "data.name: expected digits, folder, shards"),
        ({"data__name": "wds/imagenet"}, "is a stream"),
        ({"train__batch_size": 64}, "train.batch_size: expected at most 48"),
        ({"evaluate__resolutions": (16, 18)}, "expected multiples of the patch size 4, got 18"),
        ({"model__name": "vit_nano_patch5_16"}, "multiples of patch_size"),
        ({"model__position": "comrope"}, "model: position: expected one of"),
        ({"optim__name": "adamx"}, "optim.name: .*adamx"),
        ({"optim__schedule": "plateau"}, "optim.schedule: expected one of cosine"),
        (
            {"data__in_chans": 2, "data__mean": (0.0, 0.0), "data__std": (1.0, 1.0)},
            "data.in_chans: expected 1 or 3, got 2",
        ),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(folder, overrides, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(config_for(folder, **overrides), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_an_empty_class_is_named(folder, tmp_path):
    (folder / "train" / "emu").mkdir()
    with pytest.raises(UserError, match=r"class 'emu' of split 'train' has no images"):
        train(config_for(folder), tmp_path / "run", progress=False)


def test_a_class_that_was_never_trained_is_named(folder, tmp_path):
    (folder / "val" / "emu").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "val" / "emu" / "1.png")
    with pytest.raises(UserError, match="has classes that 'train' has not: emu"):
        train(config_for(folder), tmp_path / "run", progress=False)


def test_a_class_without_validation_images_keeps_the_numbers_of_the_others(folder):
    (folder / "train" / "ant").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "train" / "ant" / "1.png")
    source, validation = open_sources(config_for(folder, data__num_classes=3))
    assert {validation.load(i)[1] for i in range(len(validation))} == {1, 2}
    assert {source.load(i)[1] for i in range(len(source))} == {0, 1, 2}


def test_imagenette_as_it_is_distributed(tmp_path):
    data = os.environ.get("COMROPE_DATA")
    if not data:
        pytest.skip("COMROPE_DATA is not set")
    with tarfile.open(Path(data) / "imagenette128.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    config = config_for(
        tmp_path / "imagenette128",
        model__name="vit_nano_patch16_64",
        data__num_classes=10,
        data__workers=2,
        train__epochs=1,
        train__batch_size=256,
        optim__lr=2e-3,
        augment__scale=(0.5, 1.0),
        evaluate__resolutions=(64, 96),
    )
    result = train(config, tmp_path / "run", progress=False)
    assert result["images"] == 3925
    assert result["top1"]["64"] > 20  # chance is 10
    assert result["unreadable"] == {"training": 0, "validation": 0}
