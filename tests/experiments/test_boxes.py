"""Images with boxes: what is augmented together stays together; bad files are named."""

from __future__ import annotations

import importlib.util
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from comrope.experiments.common.errors import UserError
from comrope.experiments.config import load_recipe
from comrope.experiments.data.batches import IGNORED, Key
from comrope.experiments.data.boxes import BoxedImages, collate_boxes, open_boxed
from comrope.experiments.data.scenes import SIDE, Scenes
from comrope.experiments.training.evaluate import build_model

BOX = [20, 10, 30, 16]  # left, top, width, height
POLYGON = [[20, 10, 50, 10, 50, 26, 20, 26]]


def config(root=None, **fields):
    base = load_recipe("scenes").with_overrides({"detect.image_size": 64})
    if root is None:
        return base.with_overrides(fields)
    three = {"data.mean": [0.5] * 3, "data.std": [0.2] * 3, "data.in_chans": 3}
    names = {"data.name": "coco", "data.root": str(root), "data.val_split": "val"}
    return base.with_overrides({**three, **names, "data.num_classes": 2, **fields})


@pytest.fixture
def folder(tmp_path):
    """A box of category 90 on blue in 7.png, red and to the right orange; nothing in 3.png. The
    same to validate."""
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
        Image.fromarray(pixels[:, ::-1] * 0).save(tmp_path / split / "3.png")
    return tmp_path


def edges(region):
    """Left, top, right, bottom of what is true."""
    rows, columns = region.any(1).nonzero(), region.any(0).nonzero()
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_boxes_and_masks_follow_the_pixels(folder):
    fields = {"detect.kind": "mask", "detect.jitter": [0.4, 2.0], "augment.hflip": 0.5}
    settings = config(folder, **fields)
    images = BoxedImages(open_boxed(settings)[0], settings, train=True)
    flips, widths = set(), set()
    for place in range(60):
        image, target, _ = images[Key(3, place, 0)].image
        assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
        red = (image[0].int() - image[2].int()) > 0
        if not len(target["boxes"]):
            assert red.sum() <= 2 * 64  # cut away, all but what is less than a pixel wide
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


def test_a_draw_is_a_function_of_its_key(folder):
    settings = config(folder)
    images = BoxedImages(open_boxed(settings)[0], settings, train=True)
    first, same, other = (images[Key(0, place, 0)].image for place in (5, 5, 6))
    assert torch.equal(first[0], same[0])
    assert torch.equal(first[1]["boxes"], same[1]["boxes"])
    assert not torch.equal(first[0], other[0])


def test_evaluation_sees_images_as_they_are(folder):
    settings = config(folder)
    source = open_boxed(settings, train=False)[1]
    images = BoxedImages(source, settings, train=False)
    batch = collate_boxes([images[Key(0, 0, 0)], images[Key(0, 1, 1)], images[Key(0, -1, 1)]])
    seen, targets = batch.on(torch.device("cpu"))
    assert [image.shape for image in seen] == [(3, 48, 80), (3, 48, 80), (3, 8, 8)]
    assert seen[0][:, 0, 0].tolist() == [0, 0, 1]
    assert targets[0]["boxes"].tolist() == [[20, 10, 50, 26]]
    assert targets[0]["labels"].tolist() == [2]
    assert targets[1]["boxes"].shape == (0, 4)  # an image without boxes is one
    assert batch.image_ids == [7, 3, IGNORED]


def test_training_and_evaluation_show_the_same_image(folder):
    """Fitted into the square before, or by the detector: with antialiasing, at one place."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 80, 3), np.uint8)
    Image.fromarray(noise).save(folder / "train" / "7.png")
    settings = config(folder, **{"detect.jitter": [1.0, 1.0], "detect.image_size": 32})
    trained = BoxedImages(open_boxed(settings)[0], settings, train=True)[Key(0, 0, 0)].image[0]
    model = build_model(settings).eval()
    image = torch.from_numpy(noise).permute(2, 0, 1).float() / 255
    seen = model.transform([image])[0].tensors[0]
    wanted = model.transform([trained.float() / 255])[0].tensors[0]
    inside = wanted[:, :19]
    torch.testing.assert_close(seen[:, :19, :32], inside, rtol=0, atol=0.02 / 0.2)
    assert (seen[:, :19, :32] - inside).std() < 0.01 / 0.2
    assert inside.std() > 0.3


def test_padding_is_what_is_zero_after_normalisation(folder):
    settings = config(folder, **{"detect.jitter": [0.5, 0.5]})
    images = BoxedImages(open_boxed(settings)[0], settings, train=True)
    image = images[Key(0, 0, 0)].image[0]
    assert torch.equal(image[:, 40:, 40:], torch.full((3, 24, 24), 128, dtype=torch.uint8))


def test_run_lengths_are_read_as_polygons_are(folder):
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
    as_it_is = {"detect.image_size": 80, "detect.jitter": [1.0, 1.0]}
    settings = config(folder, **{"detect.kind": "mask"}, **as_it_is)
    images = BoxedImages(open_boxed(settings)[0], settings, train=True)
    polygon, runs, column = images[Key(0, 0, 0)].image[1]["masks"]
    assert torch.equal(polygon, runs)
    assert edges(polygon > 0) == [20, 10, 50, 26]
    assert edges(column > 0) == [20, 10, 21, 26]


def test_processes_that_load_are_not_given_the_file(folder):
    source = open_boxed(config(folder, **{"detect.kind": "mask"}))[0]
    sent = pickle.loads(pickle.dumps(source))
    assert sent.truth is None
    assert not any(isinstance(value, torch.Tensor) for value in vars(sent).values())
    for ours, theirs in zip(source.target(0), sent.target(0), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_what_cannot_be_read_is_named_or_passed_over(folder):
    (folder / "train" / "7.png").unlink()
    settings = config(folder)
    images = BoxedImages(open_boxed(settings)[0], settings, train=True)
    assert "7.png: cannot be read" in images[Key(0, 0, 0)].fatal
    settings = config(folder, **{"data.unreadable": "skip"})
    images = BoxedImages(open_boxed(settings)[0], settings, train=True)
    item = images[Key(0, 0, 0)]
    assert item.fatal is None
    assert item.unreadable == [str(folder / "train" / "7.png")]
    assert item.image[2] == 3


def test_data_that_cannot_be_meant_is_refused(folder):
    with pytest.raises(UserError, match=r"data\.num_classes: .* has 2 classes, got 3"):
        open_boxed(config(folder, **{"data.num_classes": 3}))
    file = folder / "annotations" / "instances_train.json"
    file.write_text(file.read_text().replace('"segmentation"', '"outline"'))
    with pytest.raises(
        UserError, match=r"annotation 1 has no segmentation .*\(none\); expected box"
    ):
        open_boxed(config(folder, **{"detect.kind": "mask"}))
    file.write_text(file.read_text().replace('"bbox": [20', '"bbox": [200'))
    with pytest.raises(UserError, match="no box of split 'train' is in its image"):
        open_boxed(config(folder))
    file = folder / "annotations" / "instances_val.json"
    file.write_text(file.read_text().replace('"segmentation"', '"outline"'))
    with pytest.raises(UserError, match=r"annotation 1 has no segmentation"):
        open_boxed(config(folder, **{"detect.kind": "mask"}), train=False)
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({**tree, "annotations": []}))
    with pytest.raises(UserError, match="a split without any box"):
        open_boxed(config(folder))
    file.write_text(json.dumps(tree).replace("90", "91"))
    with pytest.raises(UserError, match="have other categories"):
        open_boxed(config(folder))


def test_what_is_missing_is_told_before_anything_is_trained(monkeypatch):
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pycocotools" else known(name)
    )
    with pytest.raises(UserError, match=r"pycocotools, which is not installed: .*\[detection\]"):
        open_boxed(config())


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("train.perturbation", 1.0, r"train\.perturbation: expected 0 of a detector, got 1"),
        ("train.strategy", "fsdp2", r"train\.strategy: expected ddp of a detector"),
        ("augment.mixup", 0.5, r"augment\.mixup: is not done to images with boxes"),
        ("augment.auto_augment", "rand-m9", r"augment\.auto_augment: is not done to images"),
        ("data.cache", True, r"data\.cache: images with boxes are not kept"),
        ("model.name", "timm:vit_small_patch16_224", r"model\.name: expected vit_SIZE"),
        ("detect.jitter", [0.0, 1.0], r"detect\.jitter: expected two scales above 0"),
        ("detect.anchors", [8, 16], r"detect\.anchors: expected five sizes"),
        ("detect.kind", "masks", r"detect\.kind: expected one of mask, box, got 'masks'"),
        ("optim.layer_decay", 1.5, r"optim\.layer_decay: expected above 0 and at most 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(field, value, told):
    with pytest.raises(UserError, match=told):
        config(**{field: value})


def test_scenes_are_the_same_every_time_and_say_where_their_digits_are():
    first, again, val = Scenes(train=True), Scenes(train=True), Scenes(train=False)
    image, target = first.load(5)
    assert image.tobytes() == again.load(5)[0].tobytes() != val.load(5)[0].tobytes()
    assert image.size == (SIDE, SIDE)
    pixels = np.asarray(image)
    for left, top, right, bottom in target.boxes.int().tolist():
        assert 0 <= left < right <= SIDE
        assert 0 <= top < bottom <= SIDE
        assert pixels[top:bottom, left:right].max() > 150  # ink, where the noise ends at 60
        pixels = pixels.copy()
        pixels[top:bottom, left:right] = 0
    assert pixels.max() <= 60  # and nowhere else
    written = [a for a in first.truth["annotations"] if a["image_id"] == 5]
    assert [a["category_id"] + 1 for a in written] == target.labels.tolist()
    assert [a["bbox"][:2] for a in written] == target.boxes[:, :2].tolist()
