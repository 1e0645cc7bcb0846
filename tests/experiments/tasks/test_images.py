"""Classification of images: perturbed positions, top-1, and training on files."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import raises_for
from support.images import config_for, shards_of, spoil, tar_of
from support.runs import tiny

import comrope
from comrope.experiments.common import memory
from comrope.experiments.common.distributed import create_accelerator
from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import seed_everything
from comrope.experiments.config import load_recipe
from comrope.experiments.data.batches import Key
from comrope.experiments.tasks import images, task_of
from comrope.experiments.tasks.base import Probe, Step
from comrope.experiments.tasks.images import ImageTask, ImageView, normalize
from comrope.experiments.training.evaluate import evaluate_run
from comrope.experiments.training.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def step(number: int = 2, part: int = 0, process: int = 0) -> Step:
    return Step(number, part, process, CPU)


# Views


@pytest.mark.parametrize("recipe", ["digits", "moving", "deit"])
def test_transforms_are_tried_without_data(recipe):
    config = load_recipe(recipe).with_overrides({"augment.interpolation": "random"})
    task, draws = task_of(config), []
    for tried in (False, True):
        seed_everything("a test")
        if tried:
            task.try_transforms(task.views().values())
        draws.append((random.random(), float(torch.rand(1)), np.random.random()))  # noqa: NPY002
    assert draws[0] == draws[1]


@pytest.mark.parametrize("recipe", ["digits", "moving"])
def test_a_transform_that_fails_is_refused(recipe, monkeypatch):
    def failing(*args, **options):
        return lambda image: 1 // 0

    task = task_of(load_recipe(recipe))
    views = task.views().values()
    monkeypatch.setattr(images, "evaluation_transform", failing)
    task.try_transforms([])
    with raises_for("augment", UserError):
        task.try_transforms(views, train=False)
    monkeypatch.setattr(images, "training_transform", failing)
    with raises_for("augment", UserError):
        task.try_transforms([])


class OwnSamples(ImageTask):
    """A task outside of the package, whose samples need a source."""

    def dataset(self, source, view):
        return [source.load(0)]


def test_samples_of_a_task_outside_of_the_package_are_not_tried():
    task = OwnSamples(tiny())
    task.try_transforms(task.views().values())


def test_views_that_no_machine_has_memory_for_are_refused(monkeypatch):
    task = task_of(tiny(data__num_classes=10))
    model = task.build_model()
    monkeypatch.setattr(memory, "total_memory", lambda device: 200_000)
    task.check_view(model, ImageView(12))
    with raises_for("evaluate.resolutions", UserError):
        task.check_view(model, ImageView(1200))
    monkeypatch.setattr(memory, "total_memory", lambda device: 1000)
    with raises_for("model.name", UserError):
        task.check_view(model, task.training_view)


def test_views_are_resolutions():
    task = task_of(tiny(evaluate__resolutions=(6, 12)))
    assert task.training_view == ImageView(12)
    assert task.views() == {"6": ImageView(6), "12": ImageView(12)}
    assert task.views([24]) == {"24": ImageView(24)}
    assert ImageView(24).size == 4 * ImageView(12).size
    assert task.format_view("24") == "24 px"
    moved = task.describe("24", {"top1": 99.5, "offset": 0.5})
    assert {"24", "99.50", "0.5²)"} <= set(moved.replace("N(0,", "").split())


def test_views_are_whole_patches():
    task = task_of(tiny())
    model = task.build_model()
    task.check_view(model, ImageView(8))
    for resolution in (0, 2, 13):
        with raises_for("evaluate.resolutions", UserError):
            task.check_view(model, ImageView(resolution))


# Data


def test_pixels_are_normalised_by_channel():
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    found = normalize(images, mean, std, CPU)
    for channel in range(3):
        expected = (images[:, channel] / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(found[:, channel], expected, rtol=1e-4, atol=1e-4)


def test_training_samples_are_augmented_and_validation_samples_are_not():
    task = task_of(tiny(augment__scale=(0.1, 0.5)))
    source = task.open().train
    training = task.dataset(source, None)
    assert not torch.equal(training[Key(0, 1, 3)].image, training[Key(1, 1, 3)].image)
    view = ImageView(24)
    evaluation = task.dataset(source, view)
    images = [evaluation[Key(epoch, 1, 3, view)].image for epoch in (0, 1)]
    assert torch.equal(*images)
    assert images[0].shape == (1, 24, 24)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's open file
@pytest.mark.parametrize(("name", "pack"), [("folder", tar_of), ("shards", shards_of)])
@pytest.mark.parametrize("cache", [False, True])
def test_sources_are_opened_as_configured(name, pack, cache, folder, tmp_path_factory):
    packed = tmp_path_factory.mktemp("packed")
    pack(folder, packed)
    task = task_of(config_for(packed, data__name=name, data__cache=cache, data__holdout=0.25))
    opened = task.open()
    assert (len(opened.train), len(opened.validation)) == (36, 12)
    alone = task.open(train=False)
    assert alone.train is None
    assert [alone.validation.name(i) for i in range(12)] == [
        opened.validation.name(i) for i in range(12)
    ]


# Positions


@pytest.mark.parametrize("sigma", [0.0, 0.1])
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_patch_centres_are_perturbed_by_patches(sigma, per):
    config = tiny(train__perturbation=sigma, train__perturbation_per=per, train__batch_size=600)
    task = task_of(config)
    model = task.build_model()
    place, centres = task.training_positions(model, step()), comrope.grid((3, 3))
    if not sigma:
        assert torch.equal(place, centres)
        return
    assert place.shape == ((600, 9, 2) if per == "sample" else (9, 2))
    noise = 3 * (place - centres)  # in patches
    assert float(noise.std()) == pytest.approx(sigma, rel=0.05 if per == "sample" else 0.5)
    assert torch.equal(task.training_positions(model, step()), place)
    assert not torch.equal(task.training_positions(model, step(3)), place)


def test_some_axes_only_are_perturbed():
    task = task_of(tiny(train__perturbation_axes=(1,)))
    moved = task.training_positions(task.build_model(), step()) != comrope.grid((3, 3))
    assert bool(moved[..., 1].all())
    assert not bool(moved[..., 0].any())


@pytest.mark.parametrize(("part", "process", "first"), [(0, 0, 0), (1, 0, 3), (0, 1, 6)])
def test_every_part_of_a_step_has_its_own_share_of_the_draw(part, process, first):
    """The positions that the model gets, of a step of 12 in two processes of two parts."""
    task = task_of(tiny(train__batch_size=12, train__accumulate=2))
    model = task.build_model()
    given = []
    model.register_forward_pre_hook(lambda module, inputs: given.append(inputs[1]))
    batch = task.collate([task.dataset(task.open().train, None)[Key(0, i, i)] for i in range(3)])
    loss = task.loss(model, batch, step(part=part, process=process))
    everything = task.training_positions(model, step())
    assert torch.equal(given[0], everything[first : first + 3])
    logits = model(task.normalize(batch.inputs, CPU), given[0])
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, batch.targets))


# Evaluation


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_top1_is_the_share_of_images_that_are_classified_right(offset):
    """Image by image, without batches."""
    task = task_of(tiny(model__position="liere", evaluate__batch_size=100))
    model, accelerator = task.build_model().eval(), create_accelerator("cpu")
    source, view = task.open(train=False).validation, task.training_view
    done = []
    found = task.evaluate(
        model, task.validation(source), view, accelerator,
        probe=Probe(offset), advance=done.append,
    )  # fmt: skip
    assert (found["images"], found["unreadable"], sum(done)) == (360, 0, 400)  # the last is filled
    confusion = torch.tensor(found["confusion"])
    assert found["top1"] == pytest.approx(100 * int(confusion.trace()) / 360)
    if offset:
        usual = task.evaluate(model, task.validation(source), view, accelerator)
        assert found["confusion"] != usual["confusion"]  # LieRE notices
        # Every image has a draw of its own, however images are put into batches.
        few = task_of(task.config.with_overrides({"evaluate.batch_size": 7}))
        again = few.evaluate(model, few.validation(source), view, accelerator, probe=Probe(offset))
        assert again["confusion"] == found["confusion"]
        return
    expected, images = torch.zeros(10, 10, dtype=torch.int64), task.dataset(source, view)
    with torch.no_grad():
        for number in range(len(source)):
            image = images[Key(0, number, number, view)]
            logits = model(task.normalize(torch.as_tensor(image.image)[None], CPU))
            expected[image.target, logits.argmax()] += 1
    assert torch.equal(confusion, expected)


def test_counts_of_the_training_resolution_are_kept_with_the_names_of_classes():
    task = task_of(tiny())

    class Source:
        classes = ("zero", "one")

    by_view = {"12": {"top1": 1.0, "confusion": [[1]]}, "24": {"top1": 2.0, "confusion": [[2]]}}
    assert task.summarize(Source(), by_view) == {
        "top1": {"12": 1.0, "24": 2.0}, "classes": ["zero", "one"], "confusion": [[1]]
    }  # fmt: skip
    assert task.summarize(Source(), {"24": {"top1": 2.0}}) == {"top1": {"24": 2.0}}


# Training on files


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_unreadable_images_stop_a_run_or_are_skipped_named_and_counted(
    workers, folder, tmp_path, capfd
):
    bad, other = spoil(folder, "train"), spoil(folder, "val")
    config = config_for(folder, data__workers=workers)
    with raises_for(str(bad), UserError):
        train(config, tmp_path / "run", progress=False)
    config = config.with_overrides({"data.unreadable": "skip"})
    result = train(config, tmp_path / "run", progress=False)
    assert result["unreadable"] == {"training": 2, "validation": 1}
    assert result["images"] == 15
    printed = capfd.readouterr().err
    assert printed.count(str(bad)) == 2  # in every epoch
    assert printed.count(str(other)) == 1  # once, in two evaluations
    shutil.rmtree(folder / "train")  # not needed to evaluate
    (entry,) = evaluate_run(tmp_path / "run", progress=False)
    assert (entry["images"], entry["unreadable"]) == (15, 1)
    assert capfd.readouterr().err.count(str(other)) == 1
    for file in (folder / "val").rglob("*.*"):
        file.write_bytes(b"")
    with raises_for("data.root", UserError):
        evaluate_run(tmp_path / "run", progress=False)
    assert other.exists()


def test_held_out_images_validate_and_are_never_trained_on(folder, tmp_path):
    """Reading an image that cannot be read would count it."""
    shutil.rmtree(folder / "val")  # the usual validation set is not needed
    config = config_for(
        folder, data__holdout=0.25, data__unreadable="skip", train__batch_size=12, evaluate__every=0
    )
    opened = task_of(config).open()
    for part, source in (("validation", opened.validation), ("training", opened.train)):
        bad = Path(source.name(5))
        content = bad.read_bytes()
        os.truncate(bad, 30)
        result = train(config, tmp_path / part, progress=False)
        bad.write_bytes(content)
        read = {"training": config.train.epochs, "validation": 1}[part]
        assert result["unreadable"] == {"training": 0, "validation": 0} | {part: read}
        assert result["steps"] == 6  # 36 images, twelve a step, twice
        assert sum(map(sum, result["confusion"])) == 12 - (part == "validation")


def test_a_run_is_evaluated_on_what_it_held_out_unless_told_otherwise(folder, tmp_path):
    result = train(config_for(folder, data__holdout=0.25), tmp_path / "run", progress=False)
    (same,) = evaluate_run(tmp_path / "run", progress=False)
    assert (same["images"], same["top1"]) == (12, result["top1"]["16"])
    (usual,) = evaluate_run(tmp_path / "run", overrides=["data.holdout=0"], progress=False)
    assert usual["images"] == 16
    with raises_for("data.holdout", UserError):
        evaluate_run(tmp_path / "run", overrides=["data.holdout=0.5"], progress=False)


@pytest.mark.slow
def test_imagenette_is_learned(tmp_path):
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


def test_the_views_of_the_papers_recipe_are_its_resolutions():
    views = task_of(load_recipe("imagenet")).views()
    assert {"112", "224", "512"} <= set(views)
