"""Patches, and absolute positions at any position."""

from __future__ import annotations

import torch
from torch import nn

import comrope
from comrope.models.embeddings import AbsolutePositions, Patches


def test_patches_are_a_strided_convolution():
    patches = Patches((2, 3), 4, 16)
    x = torch.randn(2, 4, 8, 9)
    kernel = patches.proj.weight.view(16, 4, 2, 3)
    expected = nn.functional.conv2d(x, kernel, patches.proj.bias, stride=(2, 3))
    torch.testing.assert_close(patches(x), expected.flatten(2).mT, rtol=1e-4, atol=1e-5)


def test_ape_is_its_codebook_at_the_patch_centres_and_linear_in_between():
    ape = AbsolutePositions((3, 4), 5)
    nn.init.normal_(ape.codebook)
    torch.testing.assert_close(ape(comrope.grid((3, 4))), ape.codebook.data)
    halfway = torch.tensor([[1 / 3, 0.375]])  # between rows 0 and 1, at the centre of column 1
    expected = (ape.codebook[1] + ape.codebook[5])[None] / 2
    torch.testing.assert_close(ape(halfway), expected.detach())
    beyond = torch.tensor([[-3.0, 7.0]])
    torch.testing.assert_close(ape(beyond), ape.codebook[3:4].data)


def test_ape_equals_torchs_bilinear_sampling_and_varies_along_both_axes():
    ape = AbsolutePositions((5, 7), 3)
    nn.init.normal_(ape.codebook)
    positions = torch.rand(2, 11, 2)
    image = ape.codebook.view(1, 5, 7, 3).permute(0, 3, 1, 2).expand(2, -1, -1, -1)
    expected = nn.functional.grid_sample(
        image, (2 * positions - 1).flip(-1)[:, :, None], padding_mode="border", align_corners=False
    )
    torch.testing.assert_close(ape(positions), expected[..., 0].mT, rtol=1e-4, atol=1e-5)
    codes = ape(comrope.grid((5, 7))).view(5, 7, 3)
    assert codes.diff(dim=0).abs().min() > 0
    assert codes.diff(dim=1).abs().min() > 0
