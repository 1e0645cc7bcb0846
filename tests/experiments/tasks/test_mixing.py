"""Mixup, CutMix, erasing and label smoothing of whole batches."""

from __future__ import annotations

import pytest
import torch
from helpers import raises_for
from torch.nn.functional import log_softmax

from comrope.experiments.common.errors import UserError
from comrope.experiments.common.randomness import seed_everything
from comrope.experiments.config import Augment
from comrope.experiments.tasks.mixing import MixAndSmooth

IMAGES, CLASSES = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8), torch.tensor([0, 1, 2, 2])


def test_without_augmentation_nothing_changes():
    images, targets = MixAndSmooth(Augment(), 3)(IMAGES, CLASSES)
    assert images is IMAGES
    assert targets is CLASSES


@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_images_and_targets_are_mixed_in_one_proportion(options):
    seed_everything(1)
    images, targets = MixAndSmooth(Augment(**options), 3)(IMAGES.clone(), CLASSES)
    share = targets[0, 0]  # of the first image, of class 0; the last one is of class 2
    assert 0 < share < 1
    torch.testing.assert_close(targets[0], torch.stack((share, 0 * share, 1 - share)))
    torch.testing.assert_close(images[0].mean(), 3 * (1 - share))


def test_only_pairs_are_mixed():
    with raises_for("augment.mixup", UserError):
        MixAndSmooth(Augment(mixup=0.8), 3)(IMAGES[:3], CLASSES[:3])


def test_some_of_each_image_is_erased():
    seed_everything(0)
    images, targets = MixAndSmooth(Augment(erase=1.0), 3)(IMAGES.clone(), CLASSES)
    changed = (images != IMAGES).float().mean((1, 2, 3))
    assert changed.min() > 0
    assert changed.max() < 0.5
    assert targets is CLASSES


@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_targets_are_smoothed_once(mixup):
    mix = MixAndSmooth(Augment(smoothing=0.3, mixup=mixup), 3)
    logits = torch.randn(4, 3)
    if mixup:
        seed_everything(0)
        _, targets = mix(IMAGES.clone(), CLASSES)
        assert targets.min() == pytest.approx(0.1)
    else:
        targets = CLASSES
    expected = targets if mixup else 0.1 + 0.7 * torch.eye(3)[CLASSES]
    loss = -(expected * log_softmax(logits, -1)).sum(1).mean()
    torch.testing.assert_close(mix.loss(logits, targets), loss)
    torch.testing.assert_close(mix.loss(logits.double(), targets), loss)  # in float32
