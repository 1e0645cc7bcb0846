"""Detectors on a plain ViT."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for
from support.backbones import small
from torchvision.ops import box_iou

from comrope.analysis import rotary_modules
from comrope.models.detection.detector import detector


def tiny_detector(kind, vit=None, **options):
    options = {"window": 3, "image_size": 96, "out_channels": 16, "global_blocks": (1,), **options}
    few = {"rpn_post_nms_top_n_train": 50, "rpn_post_nms_top_n_test": 20}
    few |= {"box_batch_size_per_image": 16}
    return detector(kind, vit=vit or small(ape=True, init="zeros"), num_classes=4, **options, **few)


def examples():
    """Two boxes, one, and none, in images of three sizes."""
    boxes = [[[5, 5, 40, 30], [20, 10, 60, 50]], [[0, 0, 30, 40]], []]
    images = [torch.rand(3, 60, 80), torch.rand(3, 100, 41), torch.rand(3, 50, 50)]
    targets = []
    for image, its in zip(images, boxes, strict=True):
        masks = torch.zeros(len(its), *image.shape[1:], dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, its, strict=True):
            mask[top:bottom, left:right] = 1
        corners = torch.tensor(its, dtype=torch.float32).reshape(-1, 4)
        targets.append({"boxes": corners, "labels": torch.ones(len(its)).long(), "masks": masks})
    return images, targets


@pytest.mark.parametrize("kind", ["mask", "box"])
def test_a_step_of_training_and_what_is_found(kind):
    model = tiny_detector(kind)
    images, targets = examples()
    losses = model(images, targets)
    assert ("loss_mask" in losses) == (kind == "mask")
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    for part in (model.backbone.plain.vit.patches, model.backbone.pyramid, model.rpn):
        assert all(p.grad.abs().sum() > 0 for p in part.parameters())
    for rope in rotary_modules(model).values():
        assert rope.method.P.grad.abs().sum() > 0
    model.roi_heads.score_thresh = 0.0
    with torch.no_grad():
        found = model.eval()(images)
    for image, each in zip(images, found, strict=True):
        height, width = image.shape[1:]
        assert len(each["boxes"]) == len(each["labels"]) == len(each["scores"]) > 0
        assert (each["boxes"] >= 0).all()
        assert (each["boxes"] <= torch.tensor([width, height, width, height])).all()
        assert each["labels"].ge(1).all()
        assert each["labels"].le(3).all()
        if kind == "mask":
            assert each["masks"].shape[1:] == (1, height, width)


@pytest.mark.parametrize("finest", [None, 4])
def test_strides_are_known_not_guessed(finest):
    """torchvision would take a low image, half of which is padding, for one of half the stride."""
    model = tiny_detector("mask", finest_stride=finest).eval()
    strides = [2, 4, 8, 16] if finest is None else [4, 8, 16, 32]
    with torch.no_grad():
        model([torch.rand(3, 36, 96)])
        images = model.transform([torch.rand(3, 36, 96)])[0]
        maps = model.backbone(images.tensors)
    for pool in (model.roi_heads.box_roi_pool, model.roi_heads.mask_roi_pool):
        assert pool.scales == [1 / stride for stride in strides]
        assert (pool.map_levels.k_min, pool.map_levels.k_max) == (
            strides[0].bit_length() - 1,
            strides[-1].bit_length() - 1,
        )
    for level, stride in zip(maps.values(), [*strides, 2 * strides[-1]], strict=True):
        assert [stride * size for size in level.shape[2:]] == [*images.tensors.shape[2:]]


def test_a_detector_learns_to_find_what_it_was_shown():
    model = tiny_detector("box")
    images, targets = (each[:1] for each in examples())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = sum(model(images, targets).values())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    with torch.no_grad():
        found = model.eval()(images)[0]
    sure = found["boxes"][found["scores"] > 0.5]
    assert (box_iou(targets[0]["boxes"], sure).amax(1) > 0.5).all()


def test_errors_of_the_detector_name_the_argument():
    for options, message in (
        ({"kind": "keypoint"}, "kind: expected one of mask, box, got 'keypoint'"),
        ({"vit": small(patch_size=2)}, r"vit: expected square patches .* got \(2, 2\)"),
        ({"vit": small(patch_size=(8, 4))}, r"vit: expected square patches .* got \(8, 4\)"),
        ({"image_size": 0}, "image_size: expected an integer of at least 1, got 0"),
        ({"finest_stride": 3}, "finest_stride: expected 2, 4 or 8"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_detector(**{"kind": "box", **options})
    with raises_for("num_classes"):
        detector(vit=small(), num_classes=1)


@pytest.mark.parametrize("kind", ["mask", "box"])
def test_boxes_and_scores_are_worked_out_in_float32(kind, monkeypatch):
    """Outputs of bfloat16 heads are bfloat16; decoded in it, corners would be pixels off."""
    from torchvision.models.detection import _utils

    dtypes = set()
    decode = _utils.BoxCoder.decode_single

    def seen(self, codes, boxes):
        dtypes.update((codes.dtype, boxes.dtype))
        return decode(self, codes, boxes)

    monkeypatch.setattr(_utils.BoxCoder, "decode_single", seen)
    model = detector(kind, vit=small("comrope-ld"), num_classes=3, window=2, image_size=64).eval()
    halved = (
        model.rpn.head, model.roi_heads.box_predictor, model.roi_heads.mask_predictor,
        model.backbone.pyramid,
    )  # fmt: skip
    for module in halved:  # as under autocast, which this machine may not have
        if module is not None:
            module.register_forward_hook(_as_bfloat16, prepend=True)
    with torch.no_grad():
        (found,) = model([torch.rand(3, 64, 64)])
    assert dtypes == {torch.float32}
    assert {part.dtype for name, part in found.items() if name != "labels"} == {torch.float32}


def _as_bfloat16(module, inputs, output):
    if isinstance(output, torch.Tensor):
        return output.bfloat16()
    if isinstance(output, dict):
        return type(output)((k, _as_bfloat16(module, inputs, v)) for k, v in output.items())
    return type(output)(_as_bfloat16(module, inputs, part) for part in output)
