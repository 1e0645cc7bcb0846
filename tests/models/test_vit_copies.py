"""A forward pass of the ViT copies nothing between CPU and GPU: they would wait for each other.

Tested without a GPU, on tensors that have a device and no memory; tests/test_gpu.py tests it there.
"""

from __future__ import annotations

import pytest
import torch
from helpers import COMMUTING
from support.copies import crossings
from torch._subclasses.fake_tensor import FakeTensorMode

import comrope
from comrope.models import POSITIONS, create_model


@pytest.mark.parametrize("position", POSITIONS)
def test_nothing_is_copied_in_a_forward_pass(position):
    rotates = position not in ("none", "ape")
    backend = "spectral" if position in COMMUTING else "reference"
    options = {"backend": backend} if rotates else {}
    with FakeTensorMode():
        with torch.device("cuda"):
            model = create_model("vit_nano_patch2_12", position=position, **options)
            images = torch.empty(2, 3, 12, 12)

        def forward():
            positions = comrope.perturb(comrope.grid((6, 6), device="cuda"), 0.1, 1.0, batch_size=2)
            return model(images), model(images, positions)

        assert crossings(forward) == []


def test_copies_are_found():
    with FakeTensorMode():
        there = torch.empty(3, device="cuda")
        assert crossings(lambda: there + torch.tensor([1.0, 2.0, 3.0], device="cuda"))
        with pytest.raises(RuntimeError, match="nonzero"):
            crossings(lambda: there[there > 0])


def test_given_frequencies_are_not_copied_each_time():
    with FakeTensorMode():
        rope = comrope.RotaryEmbedding(
            "rope", num_heads=2, head_dim=8, num_axes=1, frequencies=[1.0, 0.3, 0.2, 0.1],
            backend="spectral", device="cuda",
        )  # fmt: skip
        q, positions = torch.empty(1, 2, 5, 8, device="cuda"), torch.empty(5, 1, device="cuda")
        assert crossings(lambda: rope(q, q, positions)) == []
